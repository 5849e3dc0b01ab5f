// Operators that accelerators have in one kernel, one loop over rows on the host, see fused.cpp.
#pragma once

namespace torch { class Library; }

namespace npusim {
void add_fused(torch::Library& library);  // registers them, for one backend
}
