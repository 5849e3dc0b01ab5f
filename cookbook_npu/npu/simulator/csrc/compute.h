// Operators that are computed by hand on the host, see compute.cpp.
#pragma once

namespace torch { class Library; }

namespace npusim {
void add_compute(torch::Library& library);  // registers them, for one backend
}
