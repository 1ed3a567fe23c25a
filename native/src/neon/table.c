#include "../table.h"

KTQ_DEFINE_TABLE(neon);
