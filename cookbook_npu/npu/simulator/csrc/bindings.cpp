// The Python module of the device. Plain C API: it compiles in a fraction of the time that pybind11 takes.
#include <torch/csrc/Generator.h>
#include "device.h"
#include "faults.h"
#include "generator.h"
#include "hccl.h"
#include "memory.h"
#include <c10/util/Exception.h>
#include <exception>

namespace npusim {
namespace {

// Run a function that may throw; a C++ exception becomes a Python RuntimeError.
template <typename Function>
PyObject* guarded(Function function) {
  try {
    return function();
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::exception& error) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}
PyObject* none() { Py_RETURN_NONE; }

PyObject* py_configure(PyObject*, PyObject* args) {
  PyObject* ids = nullptr;
  unsigned long long bytes = 0;
  const char* session_file = nullptr;
  if (!PyArg_ParseTuple(args, "O!Ks", &PyTuple_Type, &ids, &bytes, &session_file)) return nullptr;
  Settings settings;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(ids); ++i) {
    settings.physical_ids.push_back(static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(ids, i))));
  }
  settings.memory_bytes = bytes;
  settings.session_file = session_file;
  return guarded([&] {
    configure(std::move(settings));
    static bool registered = false;
    if (!registered) {
      register_hooks();
      take_composite_operators();
      registered = true;
    }
    return none();
  });
}

PyObject* py_add_process_group(PyObject* module, PyObject*) {
  return guarded([&] {
    add_process_group(module);
    return none();
  });
}

PyObject* py_devices_used(PyObject*, PyObject*) { return PyBool_FromLong(devices_used()); }
PyObject* py_reset_devices(PyObject*, PyObject*) {
  return guarded([&] {
    reset_devices();
    return none();
  });
}
PyObject* py_device_count(PyObject*, PyObject*) { return PyLong_FromLong(device_count()); }
PyObject* py_current_device(PyObject*, PyObject*) { return PyLong_FromLong(current_device()); }
PyObject* py_fallback_count(PyObject*, PyObject*) { return PyLong_FromLongLong(fallback_count()); }
PyObject* py_pinned_bytes(PyObject*, PyObject*) { return PyLong_FromUnsignedLongLong(pinned_bytes()); }
PyObject* py_set_device(PyObject*, PyObject* index) {
  return guarded([&] {
    const auto previous = current_device();
    set_current_device(static_cast<int>(PyLong_AsLong(index)));
    return PyLong_FromLong(previous);
  });
}
PyObject* py_check_device(PyObject*, PyObject* index) {
  return guarded([&] {
    faults::check_device(static_cast<int>(PyLong_AsLong(index)));
    return none();
  });
}
PyObject* py_default_generator(PyObject*, PyObject* index) {
  return guarded([&] { return THPGenerator_Wrap(default_generator(static_cast<int>(PyLong_AsLong(index)))); });
}

PyObject* py_memory_stats(PyObject*, PyObject* index) {
  return guarded([&] {
    const auto stats = memory_stats(static_cast<int>(PyLong_AsLong(index)));
    return Py_BuildValue("{sKsKsKsKsKsKsKsK}", "allocated", stats.allocated, "peak_allocated", stats.peak_allocated, "reserved",
                         stats.reserved, "peak_reserved", stats.peak_reserved, "live_blocks", stats.live_blocks, "allocations",
                         stats.allocations, "frees", stats.frees, "out_of_memory", stats.out_of_memory);
  });
}
PyObject* py_memory_info(PyObject*, PyObject* index) {
  return guarded([&] {
    const int device = static_cast<int>(PyLong_AsLong(index));
    const unsigned long long free = memory_free(device), total = memory_total(device);
    return Py_BuildValue("(KK)", free, total);
  });
}
PyObject* py_reset_peak(PyObject*, PyObject* index) {
  reset_peak(static_cast<int>(PyLong_AsLong(index)));
  return none();
}
PyObject* py_reset_accumulated(PyObject*, PyObject* index) {
  reset_accumulated(static_cast<int>(PyLong_AsLong(index)));
  return none();
}
PyObject* py_empty_cache(PyObject*, PyObject*) {
  empty_cache();
  return none();
}
PyObject* py_host_memory_stats(PyObject*, PyObject*) {
  const auto stats = host_stats();
  return Py_BuildValue("{sKsKsKsK}", "active", stats.active, "peak_active", stats.peak_active, "allocated", stats.allocated,
                       "peak_allocated", stats.peak_allocated);
}
PyObject* py_host_empty_cache(PyObject*, PyObject*) {
  host_empty_cache();
  return none();
}
PyObject* py_host_reset_peak(PyObject*, PyObject*) {
  host_reset_peak();
  return none();
}
PyObject* py_set_memory_total(PyObject*, PyObject* args) {
  int device = 0;
  unsigned long long bytes = 0;
  if (!PyArg_ParseTuple(args, "iK", &device, &bytes)) return nullptr;
  set_memory_total(device, bytes);
  return none();
}
PyObject* py_set_memory_fraction(PyObject*, PyObject* args) {
  int device = 0;
  double fraction = 1;
  if (!PyArg_ParseTuple(args, "id", &device, &fraction)) return nullptr;
  set_memory_fraction(device, fraction);
  return none();
}

PyObject* py_fail_allocation(PyObject*, PyObject* args) {
  int device = -1;
  long long nth = 1;
  if (!PyArg_ParseTuple(args, "iL", &device, &nth)) return nullptr;
  faults::fail_allocation(device, nth);
  return none();
}
PyObject* py_break_collective(PyObject*, PyObject* args) {
  const char* operation = nullptr;
  long long nth = 1;
  int hangs = 0;
  if (!PyArg_ParseTuple(args, "sLp", &operation, &nth, &hangs)) return nullptr;
  faults::break_collective(operation, nth, hangs ? faults::CollectiveFault::hang : faults::CollectiveFault::fail);
  return none();
}
PyObject* py_lose_device(PyObject*, PyObject* index) {
  faults::lose_device(static_cast<int>(PyLong_AsLong(index)));
  return none();
}
PyObject* py_clear_faults(PyObject*, PyObject*) {
  faults::clear();
  return none();
}

PyMethodDef methods[] = {
    {"configure", py_configure, METH_VARARGS, "configure(physical_ids, memory_bytes, session_file): before the devices are used"},
    {"devices_used", py_devices_used, METH_NOARGS, "whether this process, or the one it was forked from, has used the devices"},
    {"add_process_group", py_add_process_group, METH_NOARGS, "define ProcessGroupHCCL in this module"},
    {"reset_devices", py_reset_devices, METH_NOARGS, "as if nobody had used them; raises while tensors lie in their memory"},
    {"device_count", py_device_count, METH_NOARGS, "number of visible devices"},
    {"current_device", py_current_device, METH_NOARGS, "index of the current device"},
    {"set_device", py_set_device, METH_O, "make a device current; returns the previous one; -1 changes nothing"},
    {"check_device", py_check_device, METH_O, "raise when the device is lost"},
    {"default_generator", py_default_generator, METH_O, "random generator of a device"},
    {"fallback_count", py_fallback_count, METH_NOARGS, "operators that ran through the fallback so far"},
    {"memory_stats", py_memory_stats, METH_O, "counters of this process on a device"},
    {"memory_info", py_memory_info, METH_O, "(free, total) bytes of a device, all processes counted"},
    {"pinned_bytes", py_pinned_bytes, METH_NOARGS, "bytes of pinned host memory in use"},
    {"reset_peak", py_reset_peak, METH_O, "start the peaks again"},
    {"reset_accumulated", py_reset_accumulated, METH_O, "start the counters again"},
    {"empty_cache", py_empty_cache, METH_NOARGS, "give reserved, unused memory back to the devices"},
    {"set_memory_total", py_set_memory_total, METH_VARARGS, "(device, bytes): capacity of a device"},
    {"set_memory_fraction", py_set_memory_fraction, METH_VARARGS, "(device, fraction): what this process may take"},
    {"host_memory_stats", py_host_memory_stats, METH_NOARGS, "counters of pinned host memory"},
    {"host_empty_cache", py_host_empty_cache, METH_NOARGS, "give cached pinned blocks back to the system"},
    {"host_reset_peak", py_host_reset_peak, METH_NOARGS, "start the peaks of pinned host memory again"},
    {"fail_allocation", py_fail_allocation, METH_VARARGS, "(device, nth): fault injection"},
    {"break_collective", py_break_collective, METH_VARARGS, "(operation, nth, hangs): fault injection"},
    {"lose_device", py_lose_device, METH_O, "fault injection"},
    {"clear_faults", py_clear_faults, METH_NOARGS, "disarm every fault and bring lost devices back"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "simulated_npu", "The simulated NPU (C++ side)", -1, methods};

}  // namespace
}  // namespace npusim

PyMODINIT_FUNC PyInit_simulated_npu() { return PyModule_Create(&npusim::definition); }
