#include "memory.h"

#include <sys/mman.h>

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

void release(std::byte* memory, std::size_t bytes) { munmap(memory, bytes); }

}  // namespace pagedkv
