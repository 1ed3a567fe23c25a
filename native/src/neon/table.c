#include "../table.h"

/* These are no bottleneck of a conversion to kt-amx; the scalar code does them here, too. */
#define ktq_neon_kt_amx_untile_i8 ktq_scalar_kt_amx_untile_i8
#define ktq_neon_kt_amx_untile_i4 ktq_scalar_kt_amx_untile_i4
#define ktq_neon_group ktq_scalar_group
#define ktq_neon_product ktq_scalar_product
#define ktq_neon_product_double ktq_scalar_product_double
#define ktq_neon_nibbles_pack ktq_scalar_nibbles_pack
#define ktq_neon_nibbles_unpack ktq_scalar_nibbles_unpack
#define ktq_neon_nibble_row ktq_scalar_nibble_row
#define ktq_neon_difference ktq_scalar_difference

KTQ_DEFINE_TABLE(neon);
