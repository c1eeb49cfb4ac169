#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace pagedkv {

std::byte* allocate_zeroed(std::size_t bytes) {
  void* memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  madvise(memory, bytes, MADV_HUGEPAGE);  // a wish: where it is refused, small pages do
#endif
  return static_cast<std::byte*>(memory);
}

void touch(std::byte* memory, std::size_t bytes) {
  constexpr std::size_t kPage = 4096, kHugePage = std::size_t{2} << 20;
#pragma omp parallel for schedule(dynamic)
  for (std::size_t start = 0; start < bytes; start += kHugePage) {
    const std::size_t end = std::min(start + kHugePage, bytes);
    for (std::size_t i = start; i < end; i += kPage) {
      // A write that changes nothing, since a read would map the shared page of zeros. Volatile:
      // not to be left out.
      *static_cast<volatile std::byte*>(memory + i) = memory[i];
    }
  }
}

void release(std::byte* memory, std::size_t bytes) { munmap(memory, bytes); }

}  // namespace pagedkv
