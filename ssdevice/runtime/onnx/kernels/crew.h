// The threads that the kernels of all sessions of a process share.
//
// ONNX Runtime gives every session threads of its own. Prefill, the step and plain decoding are
// three sessions: between their calls the threads of one either sleep, and have to be woken, or
// wait busily and take a processor from another. Here a call does its work itself, and whoever of
// the crew is awake helps: nobody waits for a thread that is not there.
#pragma once

#include "kernel.h"

// How many threads, the caller among them, work on the calls of kernels that are made from now on;
// 0: those of the session.
int CrewSize();

// Runs work(data, i) for 0 <= i < total with at most so many threads of the crew, the caller among
// them.
void CrewFor(size_t threads, size_t total, Work work, void* data);
