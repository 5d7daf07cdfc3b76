// A bundle's folder. Nothing in it is used before its manifest, names, sizes and hashes are
// checked, as ssdevice/bundle does in Python: it is assumed to come from someone hostile. Keep it
// where only its user can write.
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>

#include "contract.h"
#include "phrases.h"
#include "sha256.h"

namespace fs = std::filesystem;

// ssdevice/bundle/manifest.schema.json, whose bounds the readers in all languages share.
constexpr auto kManifestSchema =
#include "manifest.schema.inc"
    ;

class Bundle {
 public:
  // `hashes`: false skips the hashes only, for files that were checked before.
  explicit Bundle(const fs::path& folder, bool hashes = true)
      : folder_(checked(folder)),
        files_(list_files()),
        manifest_(read_manifest()),
        geometry_(manifest_.at("geometry"), type_of(manifest_.at("cache_dtype"))) {
    check_functions();
    check_chat();
    check_app();
    check_files();
    if (hashes) check_hashes();
  }

  const Geometry& geometry() const { return geometry_; }
  bool streams() const { return !manifest_.at("mode").is_null(); }
  bool quantized() const {
    return manifest_.at("precision") == "int8" || manifest_.at("precision") == "int4";
  }
  bool has(const std::string& function) const { return functions_.count(function); }

  // What the model's generation_config.json recommends, at temperature 1 where it names none.
  Sampling sampling() const {
    Sampling found;
    found.temperature = 1;
    found.take(manifest_.value("sampling", Json()));
    return found;
  }

  bool recommends() const {
    return manifest_.contains("sampling") && !manifest_.at("sampling").is_null();
  }

  // The tokens that end an answer.
  Ids stops() const {
    Ids ids;
    for (const Json& id : manifest_.at("chat").at("stop_ids")) {
      if (id < 0 || id > std::numeric_limits<int32_t>::max()) {
        throw Error("chat.stop_ids: " + id.dump() + " is no token id");
      }
      ids.push_back(id);
    }
    return ids;
  }

  // What the model says often, if the bundle has a table of it.
  Phrases phrases() const {
    if (!manifest_.value("roles", Json::object()).contains(kPhrases)) return {};
    const fs::path table = file(kPhrases);
    const uintmax_t size = fs::file_size(table);
    if (size < 4 || size > Phrases::kMostBytes || size & (size - 1)) {
      throw Error(table.string() + ": " + std::to_string(size) + " bytes are no table of phrases");
    }
    std::vector<unsigned char> bytes(size);
    std::ifstream(table, std::ios::binary).read(reinterpret_cast<char*>(bytes.data()), size);
    std::vector<uint32_t> entries(size / 4);
    for (size_t at = 0; at < size; ++at) entries[at / 4] |= uint32_t{bytes[at]} << 8 * (at % 4);
    return {std::move(entries), geometry_.vocab};
  }

  // The file with a role, such as the graph of a function of the contract, which the bundle `has`.
  fs::path file(const std::string& role) const {
    const std::string path = manifest_.value("roles", Json::object()).value(role, role);
    if (!manifest_.at("files").contains(path)) {
      throw Error(folder_.string() + ": there is no file " + safe(path));
    }
    return folder_ / path;
  }

 private:
  static constexpr auto kManifest = "manifest.json";
  static constexpr auto kSignature = "manifest.json.sig";
  static constexpr auto kPhrases = "phrases";
  static constexpr size_t kMostFiles = 4096;
  static constexpr uintmax_t kMostManifestBytes = 4 << 20;

  static fs::path checked(const fs::path& folder) {
    if (!fs::is_directory(folder)) {
      throw Error(folder.string() + ": no such bundle, which is a folder");
    }
    return fs::canonical(folder);
  }

  [[noreturn]] void refuse(const std::string& why) const {
    throw Error((folder_ / kManifest).string() + ": " + why);
  }

  Type type_of(const std::string& name) const {
    const std::map<std::string, Type> types{
        {"int32", kInt32}, {"float32", kFloat}, {"float16", kHalf}};
    const auto found = types.find(name);
    if (found == types.end()) refuse("this host knows no tensors of " + safe(name));
    return found->second;
  }

  // Path -> size of every file. Links are refused wherever they lead.
  std::map<std::string, uintmax_t> list_files() const {
    std::map<std::string, uintmax_t> found;
    size_t seen = 0;
    for (auto entry = fs::recursive_directory_iterator(folder_);
         entry != fs::recursive_directory_iterator(); ++entry) {
      const std::string path = entry->path().lexically_relative(folder_).generic_string();
      const fs::file_status status = entry->symlink_status();
      if (++seen > 2 * kMostFiles || entry.depth() > 15) {
        throw Error(folder_.string() + ": too many files and folders");
      }
      if (fs::is_directory(status)) continue;
      if (!fs::is_regular_file(status)) {
        throw Error(folder_.string() + ": " + safe(path) + " is not a plain file");
      }
      found[path] = entry->file_size();
    }
    return found;
  }

  Json read_manifest() const {
    const auto file = files_.find(kManifest);
    if (file == files_.end()) refuse("there is no such file");
    if (file->second > kMostManifestBytes) {
      refuse("more than " + std::to_string(kMostManifestBytes) + " bytes");
    }
    const std::string where = (folder_ / kManifest).string();
    std::ifstream stream(folder_ / kManifest, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(stream), {}};
    const Json manifest = parse_strict(text, where);
    Schema(Json::parse(kManifestSchema)).check(manifest, where);
    if (manifest.at("target") != "onnx" || manifest.at("cache") != "rows") {
      refuse("a bundle of another target than onnx");
    }
    return manifest;
  }

  Function function_of(const Json& spec) const {
    const auto tensors = [&](const char* key) {
      std::vector<TensorSpec> made;
      for (const Json& tensor : spec.at(key)) {
        Shape shape;
        for (const Json& size : tensor.at("shape")) {
          if (size.is_string() && size != "past") {
            refuse("functions: a tensor has the unknown size " + safe(size));
          }
          shape.push_back(size.is_string() ? kPast : size.get<int64_t>());
        }
        made.push_back({tensor.at("name"), shape, type_of(tensor.at("dtype"))});
      }
      return made;
    };
    if (!spec.value("states", Json::array()).empty()) refuse("functions: a graph with states");
    return {spec.at("name"), tensors("inputs"), tensors("outputs")};
  }

  void check_functions() {
    const Json& model = manifest_.at("model");
    const int64_t msa_layers = manifest_.at("msa_layers");
    const int64_t layers = model.at("layers");  // the geometry also has those that draft
    if (layers > geometry_.layers || (layers < geometry_.layers && !streams()) ||
        model.at("vocab") != geometry_.vocab) {
      refuse("model and geometry have other layers or vocabularies");
    }
    if ((streams() && !geometry_.gamma) || (msa_layers && !streams()) || msa_layers >= layers) {
      refuse("geometry.gamma, msa_layers and mode contradict each other or the layers");
    }
    const Json sampling = manifest_.value("sampling", Json());
    for (const auto& [name, value] : sampling.items()) {
      if (value.is_number_float() && !(value >= 0 && value <= 100)) {
        refuse("sampling: " + safe(name) + " is not 0 to 100");
      }
    }
    if (geometry_.hidden && geometry_.hidden != model.at("hidden_size")) {
      refuse("model and geometry have other hidden sizes");
    }
    std::vector<std::string> names;
    for (const Json& spec : manifest_.at("functions")) {
      names.push_back(spec.at("name"));
      functions_.insert(names.back());
      if (!(function_of(spec) == geometry_.function(names.back()))) {
        refuse("function " + safe(names.back()) + " does not follow from the geometry");
      }
    }
    std::vector<std::string> ordered;
    for (const char* name : kFunctions) {
      const bool chooses = name == kVerify || name == kVerifyPlain || name == kDraft;
      const bool possible = (geometry_.hidden || !chooses) && (geometry_.few || name != kStepShort);
      if (has(name) && possible) ordered.emplace_back(name);
    }
    if (names != ordered || !has(kPrefill) || !(has(kStep) || has(kPlain)) ||
        (has(kStep) && !geometry_.gamma)) {
      refuse(
          "functions: expected prefill, and step (with streams) or step_plain, in the contract's "
          "order");
    }
    if (streams() && has(kVerify) != has(kDraft)) {
      refuse("functions: verify and draft need each other");
    }
  }

  // Frames or a template must make the text of a conversation, also for hosts that get token ids.
  void check_chat() const {
    const Json chat = manifest_.at("chat");
    const Json frames = chat.value("frames", Json());
    const auto framed = [&](const char* role) {
      return !frames.is_null() && !frames.value(role, Json()).is_null();
    };
    if (chat.at("template").is_null() && !(framed("user") && framed("assistant"))) {
      refuse("chat: no template, and no frames of whole conversations");
    }
  }

  void check_app() const {
    const Json& app = manifest_.at("apps").at(0);
    const std::string name = app.at("name");
    const auto empty = [&](const char* key) {
      return !app.contains(key) || app.at(key).is_null() || app.at(key).empty();
    };
    const bool merged = app.at("kind") == "merged";
    if (manifest_.at("apps").size() > 1 || !(merged || app.at("kind") == "base") ||
        !empty("files") || !empty("functions") || !empty("folder")) {
      refuse("app " + safe(name) +
             " is not merged into the graphs: this host runs bundles of one app");
    }
    if (manifest_.at("default_app") != name) refuse("default_app is not one of the apps");
    if (app.at("base_sha256") != manifest_.at("model").at("sha256")) {
      refuse("app " + safe(name) + " is for another base");
    }
    if (merged && !empty("mode") && app.at("mode") != manifest_.at("mode")) {
      refuse("app " + safe(name) + " has another mode than the bundle");
    }
  }

  // What a folder holds must be what the manifest lists, under names that are safe and distinct on
  // every file system.
  void check_files() const {
    const Json& listed = manifest_.at("files");
    Names folders;
    Names seen{kManifest, kSignature};
    for (const auto& [path, entry] : listed.items()) {
      for (size_t at = path.find('/'); at != std::string::npos; at = path.find('/', at + 1)) {
        folders.insert(path.substr(0, at));
      }
      for (const fs::path& part : fs::path(path)) {
        if (is_device(lower(part.string()))) {
          refuse("files: Windows reserves a name in " + safe(path));
        }
      }
      if (!seen.insert(lower(path)).second) {
        refuse("files: " + safe(path) + " appears twice, or is reserved");
      }
      const auto found = files_.find(path);
      if (found == files_.end()) throw Error((folder_ / path).string() + ": there is no such file");
      if (found->second != entry.at("size")) {
        throw Error((folder_ / path).string() + " has " + std::to_string(found->second) +
                    " bytes, " + kManifest + " says " + entry.at("size").dump());
      }
    }
    for (const std::string& folder : folders) {
      if (!seen.insert(lower(folder)).second) {
        refuse("files: " + safe(folder) + " is a folder, too");
      }
    }
    for (const auto& [path, size] : files_) {
      if (path != kManifest && path != kSignature && !listed.contains(path)) {
        refuse(safe(path) + " is not listed; remove it");
      }
    }
    for (const Json& path : manifest_.value("roles", Json::object())) {
      if (!listed.contains(path) && !folders.count(path)) {
        refuse("roles: " + safe(path) + " is not in files");
      }
    }
  }

  void check_hashes() const {
    std::vector<char> piece(1 << 16);
    for (const auto& [path, entry] : manifest_.at("files").items()) {
      std::ifstream stream(folder_ / path, std::ios::binary);
      Sha256 hash;
      while (stream.read(piece.data(), piece.size()) || stream.gcount()) {
        hash.update(reinterpret_cast<const unsigned char*>(piece.data()), stream.gcount());
      }
      if (hash.digits() != entry.at("sha256")) {
        throw Error((folder_ / path).string() + " is damaged: its sha256 is not the one in " +
                    kManifest);
      }
    }
  }

  static bool is_device(const std::string& name) {
    const std::string stem = name.substr(0, name.find('.'));
    const std::string kind = stem.substr(0, 3);
    if (stem.size() == 4) {
      return (kind == "com" || kind == "lpt") && stem[3] >= '0' && stem[3] <= '9';
    }
    return stem == "con" || stem == "prn" || stem == "aux" || stem == "nul";
  }

  static std::string lower(std::string text) {  // names are ASCII
    for (char& c : text) {
      if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    }
    return text;
  }

  fs::path folder_;
  std::map<std::string, uintmax_t> files_;
  const Json manifest_;
  Geometry geometry_;
  Names functions_;
};
