/* What the library is compiled for. Decided here alone: build.py has the compiler read this file, and takes the folders
 * that it names beside `scalar`. */
#ifndef KTQ_TARGET_H
#define KTQ_TARGET_H

#if defined(_WIN32)
#error "ktforge is for Linux and macOS: on Windows, use it within WSL"
#elif !defined(__LP64__)
#error "ktforge needs a 64-bit system: it maps files that are larger than 4 GB"
#elif __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "ktforge needs a little-endian CPU: the files that it maps are little-endian"
#endif

#if defined(__x86_64__)
#define KTQ_X86_64 1
#define KTQ_FOLDERS avx2 avx512
#elif defined(__aarch64__)
#define KTQ_AARCH64 1
#define KTQ_FOLDERS neon
#else
#define KTQ_FOLDERS /* scalar alone */
#endif

#endif
