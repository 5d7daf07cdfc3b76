// Several operators in one node: between two nodes ONNX Runtime works for some two microseconds.
//
// Region(inputs of any types ..; text) -> outputs of any types ..: the steps that ``text`` lists,
// one after another. Its first line has the numbers of inputs and outputs, I and O. Every other
// line is a step: an operator's name, those of its attributes that are numbers, and the values that
// it reads and makes, as in "AddNorm epsilon=1e-05 : 0 7 1 > 8 9". Values 0 .. I - 1 are the node's
// inputs, the next O its outputs, and all others are known inside only. A step is an operator of
// the library.

#include <locale>
#include <map>
#include <sstream>

#include "kernel.h"

namespace {

struct Step {
  std::string name;
  std::map<std::string, std::string> attributes;
  std::vector<size_t> inputs, outputs;
  const Operator* op = nullptr;
  std::unique_ptr<Kernel> kernel;
};

// A value as an input of a step.
const Tensor& Taken(const Step& step, size_t input, const Tensor& value) {
  Require(step.op->inputs[input] == value.type,
          "an input has another type than its operator takes");
  return value;
}

template <typename T>
T NumberOf(const std::string& text) {
  std::istringstream from(text);
  from.imbue(std::locale::classic());
  T value{};
  Require(from >> value && from.peek() == EOF, "a number cannot be read");
  return value;
}

Step StepOf(const std::string& line) {
  std::istringstream words(line);
  Step step;
  std::string word;
  Require(static_cast<bool>(words >> step.name), "a line is empty");
  while (words >> word && word != ":") {
    const size_t equals = word.find('=');
    Require(equals != std::string::npos, "an attribute has no value");
    step.attributes[word.substr(0, equals)] = word.substr(equals + 1);
  }
  while (words >> word && word != ">") step.inputs.push_back(NumberOf<size_t>(word));
  while (words >> word) step.outputs.push_back(NumberOf<size_t>(word));
  Require(!step.inputs.empty() && !step.outputs.empty(), "a step reads or makes nothing");
  return step;
}

// What a step's kernel is made from: the text, and constants among the inputs of the whole.
class StepInfo : public Info {
 public:
  StepInfo(const Step& step, const Info& whole, size_t inputs)
      : step_(step), whole_(whole), inputs_(inputs) {}

  float Float(const char* name) const override { return NumberOf<float>(Text(name)); }
  int64_t Int(const char* name) const override { return NumberOf<int64_t>(Text(name)); }
  std::string Text(const char* name) const override {
    const auto found = step_.attributes.find(name);
    Require(found != step_.attributes.end(), "an attribute is missing");
    return found->second;
  }
  Tensor Constant(size_t input) const override {
    const size_t value = step_.inputs.at(input);
    const Tensor known = value < inputs_ ? whole_.Constant(value) : Tensor{};
    return known.data ? Taken(step_, input, known) : known;
  }
  size_t Inputs() const override { return step_.inputs.size(); }
  size_t Outputs() const override { return step_.outputs.size(); }

 private:
  const Step& step_;
  const Info& whole_;
  size_t inputs_;
};

const Operator& OperatorOf(const Step& step) {
  for (const Operator& op : Operators())
    if (step.name == op.name && !op.Variadic()) {
      Require(op.inputs.size() == step.inputs.size() && op.outputs == step.outputs.size(),
              "a step does not fit its operator");
      return op;
    }
  throw std::runtime_error("there is no operator of this name");
}

// Runs part of the work on a step, with its name before what it raises.
template <typename Do>
auto Named(const Step& step, Do run) {
  try {
    return run();
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(step.name + ": " + error.what());
  }
}

class Fused : public Kernel {
 public:
  explicit Fused(const Info& info) {
    std::istringstream lines(info.Text("text"));
    lines.imbue(std::locale::classic());
    std::string line;
    Require(lines >> inputs_ >> outputs_ && std::getline(lines, line),
            "its first line cannot be read");
    Require(inputs_ == info.Inputs() && outputs_ == info.Outputs(),
            "its node has other numbers of inputs or outputs than its first line");
    while (std::getline(lines, line)) steps_.push_back(StepOf(line));
    CheckNumbers();
    for (Step& step : steps_)
      Named(step, [&] {
        step.op = &OperatorOf(step);
        step.kernel = step.op->make(StepInfo(step, info, inputs_));
      });
    for (size_t i = 0; i < inputs_; ++i) constants_.push_back(info.Constant(i));
    Assign();
  }

  void Compute(Context& context) const override;

 private:
  friend class StepContext;

  // A wrong text may name any number. If none is too large and none is made twice, every output is
  // made.
  void CheckNumbers() const {
    size_t made = 0;
    for (const Step& step : steps_) made += step.outputs.size();
    Require(!steps_.empty() && outputs_ <= made,
            "its steps make fewer outputs than its first line says");
    for (const Step& step : steps_)
      for (const auto* values : {&step.inputs, &step.outputs})
        for (const size_t value : *values)
          Require(value < inputs_ + made, "a value's number is too large");
  }

  // Gives every value inside a room, which it leaves after the last step that reads it.
  void Assign() {
    std::map<size_t, size_t> last;  // the last step that a value is known in
    for (size_t s = 0; s < steps_.size(); ++s)
      for (const auto* values : {&steps_[s].inputs, &steps_[s].outputs})
        for (const size_t value : *values) last[value] = s;
    std::vector<std::vector<size_t>> ended(steps_.size());
    for (const auto& [value, end] : last)
      if (value >= inputs_ + outputs_) ended[end].push_back(value);
    rooms_.resize(std::max(inputs_ + outputs_, last.rbegin()->first + 1));
    std::vector<bool> made(rooms_.size());
    std::vector<size_t> free;
    size_t count = 0;
    for (size_t s = 0; s < steps_.size(); ++s) {
      for (const size_t value : steps_[s].inputs)
        Require(value < inputs_ || made[value], "a step reads what no step before it makes");
      for (const size_t value : steps_[s].outputs) {
        Require(value >= inputs_ && !made[value], "a step makes what there is already");
        made[value] = true;
        if (value < inputs_ + outputs_) continue;
        if (free.empty()) free.push_back(count++);
        rooms_[value] = free.back();
        free.pop_back();
      }
      for (const size_t value : ended[s]) free.push_back(rooms_[value]);
    }
  }

  size_t inputs_ = 0;
  size_t outputs_ = 0;
  std::vector<Step> steps_;
  std::vector<Tensor> constants_;  // for each input, without data if it is none
  std::vector<size_t> rooms_;      // for each value; of values inside only
};

// A step's call: what it reads and makes are values of the whole.
class StepContext : public Context {
 public:
  StepContext(const Fused& fused, Context& whole)
      : fused_(fused), whole_(whole), values_(Values(fused.rooms_.size())) {
    std::copy(fused.constants_.begin(), fused.constants_.end(), values_.begin());
  }

  void Run(const Step& step) {
    step_ = &step;
    step.kernel->Compute(*this);
  }

  Tensor Input(size_t index) override {
    const size_t value = step_->inputs[index];
    if (values_[value].data == nullptr && value < fused_.inputs_)
      values_[value] = whole_.Input(value);
    return Taken(*step_, index, values_[value]);
  }
  void* Output(size_t index, const Shape& shape, Type type) override {
    const size_t value = step_->outputs[index];
    const size_t inside = fused_.inputs_ + fused_.outputs_;
    void* data = value < inside ? whole_.Output(value - fused_.inputs_, shape, type)
                                : Room(fused_.rooms_[value], shape, type);
    values_[value] = {data, shape, type};
    return data;
  }
  void For(size_t total, Work work, void* data) override { whole_.For(total, work, data); }

 private:
  // Values and rooms are this thread's, for all regions that it runs, one after another.
  static std::vector<Tensor>& Values(size_t count) {
    thread_local std::vector<Tensor> values;
    if (values.size() < count) values.resize(count);
    return values;
  }
  static void* Room(size_t number, const Shape& shape, Type type) {
    struct Words {
      size_t count = 0;
      std::unique_ptr<uint64_t[]> first;
    };
    thread_local std::vector<Words> rooms;
    const size_t words = (static_cast<size_t>(shape.Count()) * BytesOf(type) + 7) / 8;
    if (rooms.size() <= number) rooms.resize(number + 1);
    if (rooms[number].count < words) {
      rooms[number] = {};
      rooms[number].first.reset(new (std::nothrow) uint64_t[words]);
      if (rooms[number].first == nullptr) throw std::bad_alloc();
      rooms[number].count = words;
    }
    return rooms[number].first.get();
  }

  const Fused& fused_;
  Context& whole_;
  const Step* step_ = nullptr;
  std::vector<Tensor>& values_;
};

void Fused::Compute(Context& context) const {
  StepContext steps(*this, context);
  for (const Step& step : steps_) Named(step, [&] { steps.Run(step); });
}

}  // namespace

Operator Region() { return {"Region", Make<Fused>, {Type::kAny}, 1, Type::kAny}; }
