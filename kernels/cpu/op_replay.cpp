// Op replay: records operations as they run, and runs them again without Python.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/custom_class.h>

#include <string>
#include <unordered_map>
#include <unordered_set>

#include "common.h"

namespace quire {
namespace {

using c10::IValue;

// Calls `each(tensor, index in the list)` for the tensors in an argument or result; -1 if it is itself a tensor.
template <typename Each>
void for_tensors(const IValue& value, const Each& each) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) each(value.toTensor(), -1);
  } else if (value.isList()) {
    const auto elements = value.toListRef();
    for (size_t i = 0; i < elements.size(); ++i) {
      if (elements[i].isTensor() && elements[i].toTensor().defined()) each(elements[i].toTensor(), i);
    }
  }
}

constexpr int64_t kGiven = -1;  // instead of a value: a tensor that existed before

// The result of an earlier operation, used as an argument or as an element of a list argument.
struct Use {
  int64_t argument, element, value;
};

// The ends of an operation's ranges in the vectors of all operations; each starts at the end of the previous one.
struct Operation {
  c10::OperatorHandle handle;
  size_t arguments, uses, results, done;
};

// The operations of this thread between `begin` and `end`. A replay reads tensors that existed before in place; a
// result of one operation that is an argument of another is a value, which every replay recomputes.
//
// Recording a step takes little memory. The record is stored in few vectors, because many small allocations would
// fragment the heap.
class OpReplay : public torch::CustomClassHolder {
 public:
  ~OpReplay() override {
    if (recording == this) end();
  }

  void begin() {
    TORCH_CHECK(!recording && operations_.empty(), "operations are recorded once, by one OpReplay at a time");
    arguments_.reserve(kReserved);
    for (auto* each : {&results_, &done_}) each->reserve(kReserved);
    uses_.reserve(kReserved);
    operations_.reserve(kReserved);
    recording = this;
    callback_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(enter, leave).needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION}));
  }

  // Returns why the operations cannot be replayed; empty if they can.
  std::string end() {
    at::removeCallback(callback_);
    recording = nullptr;
    numbers_.clear();
    if (!reason_.empty()) {
      operations_.clear();
      arguments_.clear();
      return reason_;
    }
    // A value is freed by the last operation that uses or returns it.
    std::vector<size_t> last(num_values_);
    for (size_t i = 0; i < operations_.size(); ++i) {
      for (size_t use = i ? operations_[i - 1].uses : 0; use < operations_[i].uses; ++use) last[uses_[use].value] = i;
      for (size_t at = i ? operations_[i - 1].results : 0; at < operations_[i].results; ++at) {
        if (results_[at] != kGiven) last[results_[at]] = i;
      }
    }
    std::vector<std::pair<size_t, int64_t>> ends;
    for (int64_t value = 0; value < num_values_; ++value) ends.emplace_back(last[value], value);
    std::sort(ends.begin(), ends.end());
    for (const auto& [operation, value] : ends) {
      done_.push_back(value);
      operations_[operation].done = done_.size();
    }
    for (size_t i = 1; i < operations_.size(); ++i) {
      operations_[i].done = std::max(operations_[i].done, operations_[i - 1].done);
    }
    values_.resize(num_values_);
    return reason_;
  }

  void replay() {
    TORCH_CHECK(!recording && reason_.empty(), "these operations cannot be replayed: ", reason_);
    try {
      run();
    } catch (...) {
      std::fill(values_.begin(), values_.end(), at::Tensor());
      throw;
    }
  }

 private:
  static constexpr size_t kReserved = 1 << 12;

  void run() {
    torch::jit::Stack stack;
    size_t argument = 0, use = 0, result = 0, done = 0;
    for (const Operation& operation : operations_) {
      stack.assign(arguments_.begin() + argument, arguments_.begin() + operation.arguments);
      for (; use < operation.uses; ++use) {
        const Use& each = uses_[use];
        IValue& given = stack[each.argument];
        if (each.element < 0) {
          given = values_[each.value];
        } else {
          if (given.is(arguments_[argument + each.argument])) given = given.toList().copy();
          given.toList().set(each.element, values_[each.value]);
        }
      }
      argument = operation.arguments;
      operation.handle.callBoxed(stack);
      for (const IValue& output : stack) {
        for_tensors(output, [&](const at::Tensor& tensor, int64_t) {
          if (const int64_t value = results_[result++]; value != kGiven) values_[value] = tensor;
        });
      }
      for (; done < operation.done; ++done) values_[done_[done]] = at::Tensor();
    }
  }

  static std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
    recording->note(function, recording->depth_++ == 0 ? &OpReplay::call : &OpReplay::inner);
    return nullptr;
  }

  static void leave(const at::RecordFunction& function, at::ObserverContext*) {
    if (--recording->depth_ == 0) recording->note(function, &OpReplay::returned);
  }

  // An exception here would only log a warning, and the operation would be missing.
  void note(const at::RecordFunction& function, void (OpReplay::*how)(const at::RecordFunction&)) {
    if (!reason_.empty()) return;
    try {
      (this->*how)(function);
    } catch (const std::exception&) {
      reason_ = function.name();
    }
  }

  // An operation within a composite one: if it reads values, the composite's views, sizes and numbers may depend on
  // them.
  void inner(const at::RecordFunction& function) {
    const auto schema = function.operator_schema();
    const auto handle = schema ? c10::Dispatcher::singleton().findSchema(schema->operator_name()) : std::nullopt;
    if (handle && is_read(*handle, function.inputs())) reason_ = function.name();
  }

  void call(const at::RecordFunction& function) {
    const auto schema = function.operator_schema();
    const auto handle = schema ? c10::Dispatcher::singleton().findSchema(schema->operator_name()) : std::nullopt;
    if (!handle || is_different_each_time(*handle, function.inputs())) {
      reason_ = function.name();
      return;
    }
    const size_t first = arguments_.size();
    arguments_.insert(arguments_.end(), function.inputs().begin(), function.inputs().end());
    given_.clear();
    memory_.clear();
    std::erase_if(numbers_, [](const auto& entry) { return entry.second.tensor.expired(); });
    const size_t before = uses_.size();
    for (size_t i = first; i < arguments_.size(); ++i) find_values(arguments_[i], i - first);
    has_values_ = uses_.size() > before;
    operations_.push_back({*handle, arguments_.size(), uses_.size(), 0, 0});
  }

  // Replaces values by placeholders, and remembers the other tensors.
  void find_values(IValue& argument, int64_t place) {
    const size_t before = uses_.size();
    for_tensors(argument, [&](const at::Tensor& tensor, int64_t element) {
      const auto number = numbers_.find(tensor.unsafeGetTensorImpl());
      if (number == numbers_.end()) {
        given_.insert(tensor.unsafeGetTensorImpl());
        if (!tensor.is_mkldnn()) memory_.insert(tensor.storage().unsafeGetStorageImpl());
      } else {
        uses_.push_back({place, element, number->second.value});
      }
    });
    if (uses_.size() == before) return;
    if (uses_.back().element < 0) {
      argument = IValue();
      return;
    }
    auto list = argument.toList().copy();
    for (size_t use = before; use < uses_.size(); ++use) list.set(uses_[use].element, at::Tensor());
    argument = list;
  }

  void returned(const at::RecordFunction& function) {
    const std::vector<IValue>& outputs = function.outputs();
    if (outputs.size() != operations_.back().handle.schema().returns().size() || has_numbers(outputs)) {
      reason_ = function.name();  // it failed, or it returns a number to Python
      return;
    }
    if (is_view_of_given(outputs)) {  // which lives as long as the given tensor
      operations_.pop_back();
      arguments_.resize(operations_.empty() ? 0 : operations_.back().arguments);
      return;
    }
    for (const IValue& output : outputs) {
      for_tensors(output, [&](const at::Tensor& tensor, int64_t) { results_.push_back(number(tensor)); });
    }
    operations_.back().results = results_.size();
  }

  int64_t number(const at::Tensor& tensor) {
    if (given_.count(tensor.unsafeGetTensorImpl())) return kGiven;
    const auto known = numbers_.find(tensor.unsafeGetTensorImpl());
    if (known != numbers_.end()) return known->second.value;
    const c10::weak_intrusive_ptr<at::TensorImpl> weak(tensor.getIntrusivePtr());
    numbers_.emplace(tensor.unsafeGetTensorImpl(), Number{weak, num_values_});
    return num_values_++;
  }

  // Whether the operation only returned views of one tensor that existed before, whose offsets depend on no other
  // tensor.
  bool is_view_of_given(const std::vector<IValue>& outputs) const {
    bool is_view = !has_values_ && given_.size() == 1 && !outputs.empty();
    is_view = is_view && !operations_.back().handle.schema().is_mutable();
    for (const IValue& output : outputs) {
      for_tensors(output, [&](const at::Tensor& tensor, int64_t) {
        is_view = is_view && !tensor.is_mkldnn() && memory_.count(tensor.storage().unsafeGetStorageImpl());
      });
    }
    return is_view;
  }

  static bool has_numbers(const std::vector<IValue>& outputs) {
    return std::any_of(outputs.begin(), outputs.end(), [](const IValue& output) {
      return !output.isTensor() && !output.isTensorList() && !output.isOptionalTensorList() && !output.isNone();
    });
  }

  // Operations with object arguments (such as torch's collectives, which Python waits for), tensors that Python filled
  // with its own numbers, and in-place changes of a tensor's storage or view, which would accumulate over replays.
  static bool is_different_each_time(const c10::OperatorHandle& handle, c10::ArrayRef<const IValue> inputs) {
    const bool has_objects = std::any_of(
        inputs.begin(), inputs.end(), [](const IValue& input) { return input.isObject() || input.isStorage(); });
    return has_objects || handle.hasTag(at::Tag::inplace_view) || handle.schema().name() == "aten::lift_fresh" ||
           is_read(handle, inputs);
  }

  // Whether the result or its shape depends on tensor values; indexing by integers does not count.
  static bool is_read(const c10::OperatorHandle& handle, c10::ArrayRef<const IValue> inputs) {
    if (handle.hasTag(at::Tag::data_dependent_output)) return true;
    bool has_numbers = false, has_masks = false;
    for (const IValue& input : inputs) {
      if (!input.isList()) continue;
      for_tensors(input, [&](const at::Tensor& tensor, int64_t) {
        const bool is_mask = tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
        (is_mask ? has_masks : has_numbers) = true;
      });
    }
    return handle.hasTag(at::Tag::dynamic_output_shape) && (has_masks || !has_numbers);
  }

  static thread_local OpReplay* recording;

  std::string reason_;  // why the operations cannot be replayed
  std::vector<Operation> operations_;
  std::vector<IValue> arguments_;  // None in place of values
  std::vector<Use> uses_;
  std::vector<int64_t> results_;  // the values of the returned tensors
  std::vector<int64_t> done_;     // values to free
  std::vector<at::Tensor> values_;

  // While recording. Values are identified by address, which no other tensor has before their entry is erased.
  struct Number {
    c10::weak_intrusive_ptr<at::TensorImpl> tensor;
    int64_t value;
  };
  at::CallbackHandle callback_ = at::INVALID_CALLBACK_HANDLE;
  int64_t depth_ = 0;  // of nested operations
  int64_t num_values_ = 0;
  std::unordered_map<const void*, Number> numbers_;
  std::unordered_set<const void*> given_, memory_;  // other tensor arguments, and their storages
  bool has_values_ = false;                         // whether any argument is a value
};

thread_local OpReplay* OpReplay::recording = nullptr;

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, m) {
  m.class_<OpReplay>("OpReplay")
      .def(torch::init<>())
      .def("begin", &OpReplay::begin)
      .def("end", &OpReplay::end)
      .def("replay", &OpReplay::replay);
}

}  // namespace quire
