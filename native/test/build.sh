#!/bin/sh
# Usage: build.sh avx512|neon|native FOLDER. Builds FOLDER/compare: the library with that instruction set beside those
# of the machine's own, emulated where the machine lacks it, and compare.c. CC chooses the compiler.
set -eu
kind=$1 out=$2
cd "$(dirname "$0")"
flags="-O2 -std=c11 -ffp-contract=off -Wall -Wextra -Werror -Wno-psabi"
cc="${CC:-cc}"
mkdir -p "$out"

compile() { # flags, then sources
    extra=$1
    shift
    for source in "$@"; do
        # shellcheck disable=SC2086
        $cc $flags $extra -c "$source" -o "$out/$(echo "$source" | tr '/.' '__').o"
    done
}

rm -f "$out"/*.o
compile "" ../src/dispatch.c ../src/kt_amx.c ../src/search.c ../src/feedback.c ../src/scalar/*.c compare.c
case $kind in
native) compile "" ../src/cpu.c; compile "-mavx2 -mf16c" ../src/avx2/*.c
    compile "-mavx512f -mavx512bw -mavx512vl -mavx512dq" ../src/avx512/*.c ;;
avx512) compile "" any_cpu.c; compile "-mavx2 -mf16c" ../src/avx2/*.c
    compile "-mavx2 -mf16c -w -include simde_avx512.h" ../src/avx512/*.c ;;
neon) compile "" any_cpu.c ../src/neon/*.c ;;
esac
$cc -static "$out"/*.o -lm -o "$out/compare"
