// Strict JSON, and the part of JSON Schema that manifest.schema.json uses.
#pragma once

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

using Error = std::runtime_error;
using Json = nlohmann::json;

// A text of a bundle for a message: quoted, and nothing in it that a terminal obeys.
inline std::string safe(const std::string& text) {
  return Json(text.substr(0, 100)).dump(-1, ' ', true, Json::error_handler_t::replace);
}

// The value in a JSON text on which no two readers disagree: no key twice, no byte order mark,
// nothing after a NUL, where the library would end, and at most 32 levels.
inline Json parse_strict(const std::string& text, const std::string& where) {
  constexpr int kMostLevels = 32;
  std::vector<std::set<std::string>> seen;  // the keys of each object that is open
  const auto watch = [&](int depth, Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::object_start) seen.emplace_back();
    if (event == Json::parse_event_t::object_end) seen.pop_back();
    if (event == Json::parse_event_t::key && !seen.back().insert(value).second) {
      throw Error(where + ": key " + safe(value) + " appears twice in one object");
    }
    if (depth > kMostLevels) {
      throw Error(where + ": nested deeper than " + std::to_string(kMostLevels) + " levels");
    }
    return true;
  };
  if (!text.empty() && text[0] == '\xEF') {
    throw Error(where + ": not JSON: it begins with a byte order mark");
  }
  if (text.find('\0') != std::string::npos) {
    throw Error(where + ": not JSON: it has a NUL character");
  }
  try {
    return Json::parse(text, watch);
  } catch (const Json::exception&) {  // its text quotes what it could not read
    throw Error(where + ": not JSON, or not UTF-8");
  }
}

// The part of regular expressions that the schema uses, for whole texts: classes and groups, and
// `?`, `*`, `{n}` and `{n,m}` after them. It follows all ways at once, so that no text takes long.
class Pattern {
 public:
  static bool matches(const std::string& pattern, const std::string& text) {
    size_t at = 0;
    return Pattern{pattern, text}.sequence(at, {0}).count(text.size());
  }

 private:
  using Places = std::set<size_t>;

  Pattern(const std::string& pattern, const std::string& text) : pattern_(pattern), text_(text) {}

  // Where a sequence ends that begins at a place of `from`. Moves `at` behind it in the pattern.
  Places sequence(size_t& at, Places from) const {
    while (at < pattern_.size() && pattern_[at] != ')') {
      if (pattern_[at] == '^' || pattern_[at] == '$') {
        ++at;
        continue;
      }
      const size_t item = at;
      Places now = one(at, from);
      const auto [least, most] = repeats(at);
      Places ends = least ? Places() : from;
      for (size_t count = 1; count <= most && !now.empty(); ++count) {
        if (count >= least) ends.insert(now.begin(), now.end());
        size_t again = item;
        now = one(again, now);
      }
      from = std::move(ends);
    }
    return from;
  }

  Places one(size_t& at, const Places& from) const {
    if (pattern_[at] == '(') {
      Places ends = sequence(++at, from);
      ++at;
      return ends;
    }
    const size_t start = at;
    at = pattern_[at] == '[' ? pattern_.find(']', at) + 1 : at + 1;
    Places ends;
    for (const size_t place : from) {
      if (place < text_.size() && has(start, at, text_[place])) ends.insert(place + 1);
    }
    return ends;
  }

  // Whether a character or a class at [start, end) of the pattern has `c`.
  bool has(size_t start, size_t end, char c) const {
    if (end == start + 1) return pattern_[start] == c;
    for (size_t i = start + 1; i + 1 < end; ++i) {
      const bool range = i + 3 < end && pattern_[i + 1] == '-';
      if (c >= pattern_[i] && c <= pattern_[range ? i + 2 : i]) return true;
      if (range) i += 2;
    }
    return false;
  }

  std::pair<size_t, size_t> repeats(size_t& at) const {
    const char kind = at < pattern_.size() ? pattern_[at] : '\0';
    if (kind == '?' || kind == '*') {
      ++at;
      return {0, kind == '?' ? 1 : text_.size()};
    }
    if (kind != '{') return {1, 1};
    size_t used = 0;
    const size_t least = std::stoul(pattern_.substr(at + 1), &used);
    const size_t comma = at + 1 + used;
    const size_t most = pattern_[comma] == ',' ? std::stoul(pattern_.substr(comma + 1)) : least;
    at = pattern_.find('}', at) + 1;
    return {least, most};
  }

  const std::string& pattern_;
  const std::string& text_;
};

// Checks values against a schema.
class Schema {
 public:
  explicit Schema(Json root) : root_(std::move(root)) {}

  // Throws an Error that names the place of the first value that breaks the schema.
  void check(const Json& value, const std::string& place) const { check(value, root_, place); }

 private:
  void check(const Json& value, const Json& schema, const std::string& place) const {
    if (schema.contains("$ref")) {
      return check(value, root_.at(Json::json_pointer(schema["$ref"].get<std::string>().substr(1))),
                   place);
    }
    if (schema.contains("anyOf")) return check_any(value, schema["anyOf"], place);
    if (schema.contains("enum") &&
        std::count(schema["enum"].begin(), schema["enum"].end(), value) == 0) {
      throw Error(place + " is not one of " + schema["enum"].dump());
    }
    if (schema.contains("type") && !is_a(value, schema["type"])) {
      throw Error(place + " is " + value.type_name() + ", expected " +
                  schema["type"].get<std::string>());
    }
    if (value.is_number_integer()) within(value, schema, "minimum", "maximum", place);
    if (value.is_string()) check_text(value, schema, place);
    if (value.is_array()) {
      within(value.size(), schema, "minItems", "maxItems", place + ": the number of entries");
      for (size_t i = 0; i < value.size() && schema.contains("items"); ++i) {
        check(value[i], schema["items"], place + '[' + std::to_string(i) + ']');
      }
    }
    if (value.is_object()) check_members(value, schema, place);
  }

  void check_any(const Json& value, const Json& choices, const std::string& place) const {
    std::string problem;
    for (const Json& choice : choices) {
      try {
        return check(value, choice, place);
      } catch (const Error& error) {
        problem = error.what();
      }
    }
    throw Error(problem);
  }

  void check_text(const std::string& text, const Json& schema, const std::string& place) const {
    const auto characters =
        std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
    if (schema.contains("maxLength") && characters > schema["maxLength"]) {
      throw Error(place + " has " + std::to_string(characters) + " characters, at most " +
                  schema["maxLength"].dump() + " are allowed");
    }
    if (!schema.contains("pattern")) return;
    const std::string& pattern = schema["pattern"].get_ref<const std::string&>();
    if (!Pattern::matches(pattern, text)) {
      throw Error(place + " is " + safe(text) + ", expected " + pattern);
    }
  }

  void check_members(const Json& value, const Json& schema, const std::string& place) const {
    static const Json nothing = Json::object();
    within(value.size(), schema, "minProperties", "maxProperties",
           place + ": the number of entries");
    for (const Json& name : schema.value("required", Json::array())) {
      if (!value.contains(name)) throw Error(place + ": " + name.dump() + " is missing");
    }
    const Json& properties = schema.contains("properties") ? schema["properties"] : nothing;
    const Json& others =
        schema.contains("additionalProperties") ? schema["additionalProperties"] : nothing;
    for (const auto& [key, item] : value.items()) {
      if (schema.contains("propertyNames")) check(key, schema["propertyNames"], place + ": a name");
      const std::string inside = place + '[' + safe(key) + ']';
      if (others.is_boolean() && !others && !properties.contains(key)) {
        throw Error(inside + " is an unknown key");
      }
      check(item, properties.contains(key) ? properties[key] : others, inside);
    }
  }

  static void within(const Json& number, const Json& schema, const char* low, const char* high,
                     const std::string& what) {
    if ((schema.contains(low) && number < schema[low]) ||
        (schema.contains(high) && number > schema[high])) {
      throw Error(what + " is " + number.dump() + ", expected " +
                  schema.value(low, Json(0)).dump() + " to " + schema.value(high, Json()).dump());
    }
  }

  // A number with a fraction or an exponent is no integer.
  static bool is_a(const Json& value, const std::string& type) {
    if (type == "null") return value.is_null();
    if (type == "boolean") return value.is_boolean();
    if (type == "integer") return value.is_number_integer();
    if (type == "number") return value.is_number();
    if (type == "string") return value.is_string();
    if (type == "array") return value.is_array();
    return value.is_object();
  }

  const Json root_;
};
