// What stands before a linear (rows.cpp).
#pragma once

#include <cstdint>

// Rows [count, width]: sum = x + y, and its RMS norm times weight [width].
void NormalizeRows(const float* x, const float* y, const float* weight, int64_t count, int64_t width, float epsilon,
                   float* normed, float* sum);

// Rows [count, width] of y: silu of the first half of a row of x [count, 2 * width], times the other half.
void GateRows(const float* x, int64_t count, int64_t width, float* y);
