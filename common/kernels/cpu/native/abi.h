// The C ABI for C++ code: api.h itself stays free of preprocessor lines, because cffi reads it.
#pragma once
#include <stdint.h>

#pragma GCC visibility push(default)
extern "C" {
#include "api.h"
}
#pragma GCC visibility pop
