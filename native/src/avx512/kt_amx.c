/* Tiles of the AMX B-operand layout with AVX-512: one transposition of 16 x 16 words of 32 bits each. */
#include "../table.h"
#include "codes.h"

/* The word that is in each place of a row: as in memory, and as codes64 leaves them. */
static const int natural[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static const int packed[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};

/* Transposes 16 rows of 16 words; word w of the rows goes to out + 64 * w bytes, a tile's word row. */
static inline void transpose16(const __m512i r[16], const int order[16], int8_t *out) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) { /* b[4 g + q], lane l: place 4 l + q of rows 4 g … 4 g + 3 */
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int q = 0; q < 4; q++) {
        __m512i even0 = _mm512_shuffle_i32x4(b[q], b[4 + q], 0x88), odd0 = _mm512_shuffle_i32x4(b[q], b[4 + q], 0xDD);
        __m512i even1 = _mm512_shuffle_i32x4(b[8 + q], b[12 + q], 0x88);
        __m512i odd1 = _mm512_shuffle_i32x4(b[8 + q], b[12 + q], 0xDD);
        _mm512_storeu_si512(out + 64 * order[q], _mm512_shuffle_i32x4(even0, even1, 0x88));
        _mm512_storeu_si512(out + 64 * order[4 + q], _mm512_shuffle_i32x4(odd0, odd1, 0x88));
        _mm512_storeu_si512(out + 64 * order[8 + q], _mm512_shuffle_i32x4(even0, even1, 0xDD));
        _mm512_storeu_si512(out + 64 * order[12 + q], _mm512_shuffle_i32x4(odd0, odd1, 0xDD));
    }
}

void ktq_avx512_kt_amx_tile_i8(const int8_t *codes, size_t stride, int8_t *tile) {
    __m512i r[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(codes + (size_t)i * stride);
    transpose16(r, natural, tile);
}

void ktq_avx512_kt_amx_tile_i4(const int8_t *codes, size_t stride, int8_t *tile) {
    const __m512i low = _mm512_set1_epi8(0x0F);
    __m512i r[16];
    for (int i = 0; i < 16; i++) {
        __m512i lo = _mm512_and_si512(_mm512_loadu_si512(codes + (size_t)i * stride), low);
        __m512i hi = _mm512_and_si512(_mm512_loadu_si512(codes + (size_t)i * stride + 64), low);
        r[i] = _mm512_or_si512(lo, _mm512_slli_epi16(hi, 4)); /* nibbles: nothing crosses a byte */
    }
    transpose16(r, natural, tile);
}

/* 64 codes in the order `packed`. */
static inline __m512i codes64(const uint16_t *w, __m512 inverse) {
    return _mm512_packs_epi16(codes32(w, inverse), codes32(w + 32, inverse));
}

/* Rounds codes to multiples of 16, half away from zero; see the avx2 folder. */
static inline __m512i sixteens(__m512i codes) {
    __m512i negative = _mm512_movm_epi8(_mm512_movepi8_mask(codes));
    __m512i raised = _mm512_add_epi8(_mm512_add_epi8(codes, _mm512_set1_epi8(8)), negative);
    return _mm512_and_si512(raised, _mm512_set1_epi8((char)0xF0));
}

void ktq_avx512_kt_amx_panel_i8(const uint16_t *w, size_t stride, size_t k, const float *inverse, int8_t *out) {
    for (size_t col = 0; col < k; col += 64, out += 2048) {
        __m512i r[16];
        for (int i = 0; i < 16; i++) r[i] = codes64(w + (size_t)i * stride + col, _mm512_set1_ps(inverse[i]));
        transpose16(r, packed, out);
    }
}

void ktq_avx512_kt_amx_panel_i4(const uint16_t *w, size_t stride, size_t k, const float *inverse, int8_t *out) {
    for (size_t col = 0; col < k; col += 128, out += 2048) {
        __m512i r[16];
        for (int i = 0; i < 16; i++) {
            const uint16_t *x = w + (size_t)i * stride + col;
            const __m512 inv = _mm512_set1_ps(inverse[i]);
            __m512i low = sixteens(codes64(x, inv)), high = sixteens(codes64(x + 64, inv));
            r[i] = _mm512_or_si512(_mm512_srli_epi16(low, 4), high); /* low nibbles of both are 0 */
        }
        transpose16(r, packed, out);
    }
}
