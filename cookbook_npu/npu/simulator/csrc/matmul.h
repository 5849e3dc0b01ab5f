// Matrix products in single precision, see matmul.cpp.
#pragma once

namespace torch { class Library; }

namespace npusim {
void add_matmul(torch::Library& library);  // registers them, for one backend
}
