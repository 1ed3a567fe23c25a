#include "../table.h"

/* These are no bottleneck of a conversion to kt-amx; the AVX2 code does them here, too. */
#define ktq_avx512_kt_amx_untile_i8 ktq_avx2_kt_amx_untile_i8
#define ktq_avx512_kt_amx_untile_i4 ktq_avx2_kt_amx_untile_i4
#define ktq_avx512_group ktq_avx2_group
#define ktq_avx512_search_sums ktq_avx2_search_sums
#define ktq_avx512_product ktq_avx2_product
#define ktq_avx512_product_double ktq_avx2_product_double
#define ktq_avx512_nibbles_pack ktq_avx2_nibbles_pack
#define ktq_avx512_nibbles_unpack ktq_avx2_nibbles_unpack
#define ktq_avx512_nibble_row ktq_avx2_nibble_row
#define ktq_avx512_difference ktq_avx2_difference

KTQ_DEFINE_TABLE(avx512);
