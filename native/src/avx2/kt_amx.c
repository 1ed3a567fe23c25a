/* Tiles of the AMX B-operand layout with AVX2: four transpositions of 8 x 8 words of 32 bits each. Quantising 16 rows at
 * a time with the rows in L2 takes 16 weights in about 6 cycles, so memory is what limits it; prefetching the next 16
 * rows meanwhile gained nothing. */
#include <immintrin.h>

#include "../table.h"
#include "widen.h"

/* The word that is in each place of a row: as in memory, and as codes32 leaves them, which costs nothing this way. */
static const int natural[8] = {0, 1, 2, 3, 4, 5, 6, 7}, packed[8] = {0, 1, 4, 5, 2, 3, 6, 7};

/* Transposes eight rows of eight words; word w of the rows goes to out + 64 * w bytes, a tile's word row. */
static inline void transpose8(__m256i r[8], const int order[8], int8_t *out) {
    __m256i a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        __m256i low = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
        __m256i high = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
        _mm256_storeu_si256((__m256i *)(out + 64 * order[i]), low);
        _mm256_storeu_si256((__m256i *)(out + 64 * order[i + 4]), high);
    }
}

void ktq_avx2_kt_amx_tile_i8(const int8_t *codes, size_t stride, int8_t *tile) {
    for (int rows = 0; rows < 2; rows++)
        for (int half = 0; half < 2; half++) {
            __m256i r[8];
            for (int i = 0; i < 8; i++)
                r[i] = _mm256_loadu_si256((const __m256i *)(codes + (size_t)(8 * rows + i) * stride + 32 * half));
            transpose8(r, natural, tile + 512 * half + 32 * rows);
        }
}

void ktq_avx2_kt_amx_tile_i4(const int8_t *codes, size_t stride, int8_t *tile) {
    const __m256i low = _mm256_set1_epi8(0x0F);
    for (int rows = 0; rows < 2; rows++)
        for (int half = 0; half < 2; half++) {
            __m256i r[8];
            for (int i = 0; i < 8; i++) {
                const int8_t *c = codes + (size_t)(8 * rows + i) * stride + 32 * half;
                __m256i lo = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)c), low);
                __m256i hi = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(c + 64)), low);
                r[i] = _mm256_or_si256(lo, _mm256_slli_epi16(hi, 4)); /* nibbles: nothing crosses a byte */
            }
            transpose8(r, natural, tile + 512 * half + 32 * rows);
        }
}

void ktq_avx2_kt_amx_untile_i8(const int8_t *tile, size_t stride, int8_t *codes) {
    for (int rows = 0; rows < 2; rows++)
        for (int half = 0; half < 2; half++) {
            __m256i r[8];
            int8_t out[8 * 64];
            for (int i = 0; i < 8; i++)
                r[i] = _mm256_loadu_si256((const __m256i *)(tile + 512 * half + 64 * i + 32 * rows));
            transpose8(r, natural, out);
            for (int i = 0; i < 8; i++)
                _mm256_storeu_si256((__m256i *)(codes + (size_t)(8 * rows + i) * stride + 32 * half),
                                    _mm256_loadu_si256((const __m256i *)(out + 64 * i)));
        }
}

void ktq_avx2_kt_amx_untile_i4(const int8_t *tile, size_t stride, int8_t *codes) {
    const __m256i low = _mm256_set1_epi8(0x0F), eight = _mm256_set1_epi8(8);
    int8_t bytes[16 * 64];
    ktq_avx2_kt_amx_untile_i8(tile, 64, bytes);
    for (int row = 0; row < 16; row++)
        for (int half = 0; half < 64; half += 32) {
            __m256i v = _mm256_loadu_si256((const __m256i *)(bytes + 64 * row + half));
            __m256i lo = _mm256_and_si256(v, low), hi = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
            int8_t *c = codes + (size_t)row * stride + half;
            _mm256_storeu_si256((__m256i *)c, _mm256_sub_epi8(_mm256_xor_si256(lo, eight), eight));
            _mm256_storeu_si256((__m256i *)(c + 64), _mm256_sub_epi8(_mm256_xor_si256(hi, eight), eight));
        }
}

/* 32 codes in the order `packed`. */
static inline __m256i codes32(const uint16_t *w, __m256 inverse) {
    return _mm256_packs_epi16(ktq_codes16(w, inverse), ktq_codes16(w + 16, inverse));
}

/* Rounds codes to multiples of 16, half away from zero: 8 goes to 16, -8 to -16, 7 and -7 to 0. */
static inline __m256i sixteens(__m256i codes) {
    __m256i negative = _mm256_cmpgt_epi8(_mm256_setzero_si256(), codes);
    __m256i raised = _mm256_add_epi8(_mm256_add_epi8(codes, _mm256_set1_epi8(8)), negative);
    return _mm256_and_si256(raised, _mm256_set1_epi8((char)0xF0));
}

void ktq_avx2_kt_amx_panel_i8(const uint16_t *w, size_t stride, size_t k, const float *inverse, int8_t *out) {
    for (size_t col = 0; col < k; col += 64, out += 2048)
        for (int half = 0; half < 2; half++)
            for (int rows = 0; rows < 2; rows++) {
                __m256i r[8];
                for (int i = 0; i < 8; i++) {
                    const uint16_t *x = w + (size_t)(8 * rows + i) * stride + col + 32 * half;
                    r[i] = codes32(x, _mm256_broadcast_ss(inverse + 8 * rows + i));
                }
                transpose8(r, packed, out + 512 * half + 32 * rows);
            }
}

void ktq_avx2_kt_amx_panel_i4(const uint16_t *w, size_t stride, size_t k, const float *inverse, int8_t *out) {
    for (size_t col = 0; col < k; col += 128, out += 2048)
        for (int half = 0; half < 2; half++)
            for (int rows = 0; rows < 2; rows++) {
                __m256i r[8];
                for (int i = 0; i < 8; i++) {
                    const uint16_t *x = w + (size_t)(8 * rows + i) * stride + col + 32 * half;
                    __m256 inv = _mm256_broadcast_ss(inverse + 8 * rows + i);
                    __m256i low = sixteens(codes32(x, inv)), high = sixteens(codes32(x + 64, inv));
                    r[i] = _mm256_or_si256(_mm256_srli_epi16(low, 4), high); /* low nibbles of both are 0 */
                }
                transpose8(r, packed, out + 512 * half + 32 * rows);
            }
}
