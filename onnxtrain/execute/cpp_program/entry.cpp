// A compiled program as a Python callable: (tensors, sizes) -> (tensors, sizes).
//
// One entry serves all programs: it is compiled once for a machine, a Python and a PyTorch. In Python, a tensor's
// address, the checks of its sizes and an empty result take 0.1 to 0.6 us each; here they take hundredths.

#include <torch/csrc/autograd/python_variable.h>

#include <ATen/EmptyTensor.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/profiler/api.h>

#include <memory>
#include <vector>

namespace {

struct Kind {
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
};

// A compiled function and its program, as `Call` of call.py describes them.
struct Call {
  void (*run)(void* const*);
  std::vector<Kind> inputs;
  std::vector<size_t> read;      // the inputs whose addresses `run` takes, before those of its outputs
  std::vector<Kind> outputs;     // that it writes
  std::vector<int64_t> results;  // an output, from 0; an input, from -1 down; or kNone
  py::object sizes_in;           // a tuple; None where the program takes no sizes
  py::object sizes_out;

  bool takes(PyObject* tensors, PyObject* sizes) const;
  PyObject* operator()(PyObject* tensors) const;
};

constexpr int64_t kNone = INT64_MIN;

bool is_kind(PyObject* object, const Kind& kind) {
  if (!THPVariable_CheckExact(object)) return false;  // the elements of a subclass may mean something else
  const at::Tensor& tensor = THPVariable_Unpack(object);
  return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.scalar_type() == kind.dtype &&
      tensor.sizes() == at::IntArrayRef(kind.sizes);
}

bool Call::takes(PyObject* tensors, PyObject* sizes) const {
  if (PyTuple_GET_SIZE(tensors) != static_cast<Py_ssize_t>(inputs.size())) return false;
  for (size_t i = 0; i < inputs.size(); ++i)
    if (!is_kind(PyTuple_GET_ITEM(tensors, i), inputs[i])) return false;
  for (size_t i : read) {
    const at::Tensor& tensor = THPVariable_Unpack(PyTuple_GET_ITEM(tensors, i));
    if (!tensor.is_contiguous() || tensor.is_neg()) return false;
  }
  if (sizes_in.is_none()) return true;
  const auto size_tuple = py::reinterpret_steal<py::object>(PySequence_Tuple(sizes));
  if (!size_tuple) throw python_error();
  const int same = PyObject_RichCompareBool(size_tuple.ptr(), sizes_in.ptr(), Py_EQ);
  if (same < 0) throw python_error();
  return same;
}

PyObject* Call::operator()(PyObject* tensors) const {
  c10::SmallVector<void*, 32> pointers;
  for (size_t i : read)
    pointers.push_back(const_cast<void*>(THPVariable_Unpack(PyTuple_GET_ITEM(tensors, i)).const_data_ptr()));
  c10::SmallVector<at::Tensor, 16> written;
  for (const Kind& kind : outputs) {
    written.emplace_back(at::detail::empty_cpu(kind.sizes, kind.dtype));
    pointers.push_back(written.back().mutable_data_ptr());
  }
  run(pointers.data());
  py::tuple result_tuple(results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    PyObject* result = results[i] == kNone ? Py_NewRef(Py_None)
        : results[i] < 0                   ? Py_NewRef(PyTuple_GET_ITEM(tensors, -1 - results[i]))
                                           : THPVariable_Wrap(std::move(written[results[i]]));
    if (!result) throw python_error();
    PyTuple_SET_ITEM(result_tuple.ptr(), i, result);
  }
  return PyTuple_Pack(2, result_tuple.ptr(), sizes_out.ptr());
}

// `self` is (capsule of the Call, the ordinary program): a tuple, which the garbage collector can traverse.
PyObject* enter(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2, "expected 2 arguments, tensors and sizes, got ", count);
  PyObject* const ordinary = PyTuple_GET_ITEM(self, 1);
  if (torch::profiler::impl::profilerEnabled()) return PyObject_Vectorcall(ordinary, arguments, count, nullptr);
  const auto& call = *static_cast<Call*>(PyCapsule_GetPointer(PyTuple_GET_ITEM(self, 0), nullptr));
  const auto tensors = py::reinterpret_steal<py::object>(PySequence_Tuple(arguments[0]));
  if (!tensors) throw python_error();
  if (call.takes(tensors.ptr(), arguments[1])) return call(tensors.ptr());
  PyObject* const consumed[] = {tensors.ptr(), arguments[1]};  // arguments[0] may be an iterator, now exhausted
  return PyObject_Vectorcall(ordinary, consumed, 2, nullptr);
  END_HANDLE_TH_ERRORS
}

PyMethodDef method = {"program", reinterpret_cast<PyCFunction>(enter), METH_FASTCALL, nullptr};

std::vector<Kind> kinds(py::handle pairs) {
  std::vector<Kind> result;
  for (py::handle pair : pairs) {
    Kind kind;
    for (py::handle size : pair[py::int_(0)]) kind.sizes.push_back(size.cast<int64_t>());
    const py::object dtype = pair[py::int_(1)];
    TORCH_CHECK_TYPE(THPDtype_Check(dtype.ptr()), "expected a torch.dtype, got ", Py_TYPE(dtype.ptr())->tp_name);
    kind.dtype = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
    result.push_back(std::move(kind));
  }
  return result;
}

}  // namespace

extern "C" PyObject* make(
    void* run, PyObject* ordinary, PyObject* inputs, PyObject* read, PyObject* outputs, PyObject* results,
    PyObject* sizes_in, PyObject* sizes_out) {
  HANDLE_TH_ERRORS
  auto call = std::make_unique<Call>();
  call->run = reinterpret_cast<void (*)(void* const*)>(run);
  call->inputs = kinds(inputs);
  call->outputs = kinds(outputs);
  for (py::handle index : py::handle(read)) call->read.push_back(index.cast<size_t>());
  for (py::handle index : py::handle(results)) call->results.push_back(index.is_none() ? kNone : index.cast<int64_t>());
  call->sizes_in = py::reinterpret_borrow<py::object>(sizes_in);
  call->sizes_out = py::reinterpret_borrow<py::object>(sizes_out);
  const auto free = [](PyObject* capsule) { delete static_cast<Call*>(PyCapsule_GetPointer(capsule, nullptr)); };
  const auto capsule = py::reinterpret_steal<py::object>(PyCapsule_New(call.get(), nullptr, free));
  if (!capsule) throw python_error();
  call.release();
  const auto self = py::make_tuple(capsule, py::handle(ordinary));
  return PyCFunction_New(&method, self.ptr());
  END_HANDLE_TH_ERRORS
}
