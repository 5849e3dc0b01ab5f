#pragma once
typedef struct _object PyObject;

namespace npusim {
void add_process_group(PyObject* module);  // defines ProcessGroupHCCL in the module
}
