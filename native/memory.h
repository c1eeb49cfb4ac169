// Memory for the K/V store.
#pragma once

#include <cstddef>

namespace pagedkv {

// Zeroed memory that is taken from the system page by page as it is first touched, in huge pages
// where the system has them: a table sends reads all over it, and with 4 KiB pages each block
// would cost a TLB miss. Throws std::bad_alloc.
std::byte* allocate_zeroed(std::size_t bytes);

// Takes all pages from the system now, on all threads: a first touch costs 0.1 ms for a huge page,
// and milliseconds in a virtual machine whose host has not backed it yet.
void touch(std::byte* memory, std::size_t bytes);

void release(std::byte* memory, std::size_t bytes);

}  // namespace pagedkv
