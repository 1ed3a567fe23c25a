/* One tile of the AMX B-operand layout with AVX2: four transpositions of 8 x 8 words of 32 bits. */
#include <immintrin.h>

#include "../table.h"

/* Transposes eight rows of eight words; row r of the result goes to out + 64 * r bytes, a tile's word row. */
static inline void transpose8(__m256i r[8], int8_t *out) {
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
        _mm256_storeu_si256((__m256i *)(out + 64 * i), _mm256_permute2x128_si256(b[i], b[i + 4], 0x20));
        _mm256_storeu_si256((__m256i *)(out + 64 * (i + 4)), _mm256_permute2x128_si256(b[i], b[i + 4], 0x31));
    }
}

void ktq_avx2_kt_amx_tile_i8(const int8_t *codes, size_t stride, int8_t *tile) {
    for (int rows = 0; rows < 2; rows++)
        for (int half = 0; half < 2; half++) {
            __m256i r[8];
            for (int i = 0; i < 8; i++)
                r[i] = _mm256_loadu_si256((const __m256i *)(codes + (size_t)(8 * rows + i) * stride + 32 * half));
            transpose8(r, tile + 512 * half + 32 * rows);
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
            transpose8(r, tile + 512 * half + 32 * rows);
        }
}

void ktq_avx2_kt_amx_untile_i8(const int8_t *tile, size_t stride, int8_t *codes) {
    for (int rows = 0; rows < 2; rows++)
        for (int half = 0; half < 2; half++) {
            __m256i r[8];
            int8_t out[8 * 64];
            for (int i = 0; i < 8; i++)
                r[i] = _mm256_loadu_si256((const __m256i *)(tile + 512 * half + 64 * i + 32 * rows));
            transpose8(r, out);
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
