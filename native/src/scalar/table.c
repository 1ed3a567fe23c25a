#include "../table.h"

KTQ_DEFINE_TABLE(scalar);
