// What stands before a linear, row by row (rows.cpp).
#pragma once

#include <cstdint>

// sum = x + y, and its RMS norm; all [width].
void NormalizeRow(const float* x, const float* y, const float* weight, int64_t width, float epsilon, float* normed, float* sum);

// y[i] = silu(x[i]) * x[width + i].
void GateRow(const float* x, int64_t width, float* y);
