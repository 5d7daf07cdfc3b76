import Foundation

/// `manifest.json`, as far as a host needs it. Its types and bounds are checked against `manifest.schema.json` first.
public struct Manifest: Decodable, Sendable {
    static let schemaVersion = 1
    static let target = "coreml"
    /// The cache form of Core ML bundles: the package holds it as state.
    static let cache = "state"
    static let maxBytes = 4 << 20
    static let maxFileBytes = 1 << 37

    public struct Model: Decodable, Sendable {
        public let parameters: Int
        let layers: Int
        let hiddenSize: Int
        let vocab: Int
        let sha256: String
    }

    public struct FunctionSpec: Decodable, Sendable, Equatable {
        struct TensorSpec: Decodable, Equatable {
            let name: String
            let shape: [Int]
            let dtype: String
        }

        public let name: String
        let inputs: [TensorSpec]
        let outputs: [TensorSpec]
        let states: [TensorSpec]?
    }

    public struct App: Decodable, Sendable {
        public let name: String
        public let kind: String
        /// The package's names of the contract's functions; empty where they are the contract's own.
        public let functions: [String: String]?
        /// What stands before every message of the user.
        let instruction: String?
        let baseSha256: String
        let mode: String?
        let folder: String?
        let files: [String]?
    }

    public struct Chat: Decodable, Sendable {
        /// For hosts that run jinja2.
        let template: String?
        /// None if the template is more than texts around messages.
        let frames: Frames?
        public let stopIds: [Int]
    }

    /// What the model's `generation_config.json` asks of the choice of tokens; nil: not named.
    public struct Sampling: Decodable, Sendable {
        /// Whether transformers samples with these settings.
        public let doSample: Bool?
        let temperature, topP, minP, typicalP, repetitionPenalty: Double?
        let topK, noRepeatNgramSize, minNewTokens, minLength: Int?
        let suppress, beginSuppress: [Int32]?
        let badWords: [[Int32]]?
    }

    public struct File: Decodable, Sendable {
        public let size: Int
        public let sha256: String
    }

    public let schemaVersion: Int
    public let target: String
    /// Package -> version.
    public let tools: [String: String]
    public let precision: String
    public let schedule: String
    public let mode: String?
    public let cache: String
    public let cacheDtype: String
    public let model: Model
    public let geometry: Geometry
    public let msaLayers: Int
    public let functions: [FunctionSpec]
    public let chat: Chat
    public let apps: [App]
    public let defaultApp: String
    public let sampling: Sampling?
    public let roles: [String: String]?
    public let files: [String: File]

    /// Throws `BundleError` for anything but a consistent manifest of a Core ML bundle.
    init(_ data: Data) throws {
        let name = "manifest.json"
        let json = try JSON(data, name: name)
        guard let version = json["schema_version"]?.integer, version == Self.schemaVersion else {
            throw BundleError.unsupported("\(name) of another schema than \(Self.schemaVersion)")
        }
        guard json["target"]?.string == Self.target, json["cache"]?.string == Self.cache else {
            throw BundleError.unsupported("a bundle of another target than \(Self.target)")
        }
        var schema = try Schema.manifest()
        try schema.check(json, at: name)
        self = try decode(Manifest.self, data, name: name)
        try check()
    }

    private func check() throws {
        // The geometry also has the layers that draft.
        guard mode == nil ? model.layers == geometry.layers : model.layers <= geometry.layers,
            model.vocab == geometry.vocab
        else {
            throw BundleError.damaged("model and geometry have other layers or vocabularies")
        }
        guard [0, model.hiddenSize].contains(geometry.hidden ?? 0) else {
            throw BundleError.damaged("model and geometry have other hidden sizes")
        }
        let streams = mode != nil
        guard !streams || geometry.gamma > 0, streams || msaLayers == 0, msaLayers < model.layers else {
            throw BundleError.damaged("geometry.gamma, msa_layers and mode contradict each other or the layers")
        }
        let shares = [\Sampling.temperature, \.topP, \.minP, \.typicalP, \.repetitionPenalty]
        guard shares.allSatisfy({ 0...100 ~= sampling?[keyPath: $0] ?? 0 }) else {
            throw BundleError.damaged("sampling: a number below 0 or above 100")
        }
        try geometry.check()
        try checkFunctions()
        try checkApps()
        try checkFiles()
    }

    private func checkFunctions() throws {
        let names = functions.map(\.name)
        guard !names.contains(Function.stepShort), !apps.contains(where: { $0.functions?[Function.stepShort] != nil })
        else {
            throw BundleError.unsupported("\(Function.stepShort), which only hosts of ONNX bundles call")
        }
        let known = Function.allCases.filter { geometry.chooses || !$0.chooses }
        guard names == known.map(\.rawValue).filter(names.contains) else {
            throw BundleError.damaged("functions are \(names), out of order or unknown")
        }
        let drafting = names.contains(Function.step.rawValue)
        guard names.contains(Function.prefill.rawValue), names.count > 1, !drafting || geometry.gamma > 0 else {
            throw BundleError.damaged("functions are \(names): expected prefill, and step or step_plain")
        }
        guard drafts(names, mode) else { throw BundleError.damaged("functions are \(names): verify needs draft") }
        for spec in functions where spec != expected(Function(rawValue: spec.name)!) {
            throw BundleError.damaged("function \(spec.name) does not follow from the geometry")
        }
    }

    /// Whether functions that verify a draft of streams come with one that drafts again.
    private func drafts(_ names: some Sequence<String>, _ mode: String?) -> Bool {
        mode == nil || names.contains(Function.verify.rawValue) == names.contains(Function.draft.rawValue)
    }

    private func expected(_ function: Function) -> FunctionSpec {
        func specs(_ tensors: [Tensor]) -> [FunctionSpec.TensorSpec] {
            tensors.map { tensor in
                let shape = geometry.shape(of: tensor, in: function)
                return .init(name: tensor.rawValue, shape: shape, dtype: tensor.floats ? "float32" : "int32")
            }
        }
        let shape = [geometry.layers, geometry.kvHeads, geometry.capacity, geometry.headDim]
        return FunctionSpec(
            name: function.rawValue, inputs: specs(function.inputs), outputs: specs(function.outputs),
            states: ["keys", "values"].map { .init(name: $0, shape: shape, dtype: cacheDtype) }
        )
    }

    private func checkApps() throws {
        let names = apps.map { $0.name.lowercased() }
        guard Set(names).count == names.count else { throw BundleError.damaged("two apps have one name: \(names)") }
        guard apps.contains(where: { $0.name == defaultApp }) else {
            throw BundleError.damaged("default_app \(defaultApp) is not one of the apps \(names)")
        }
        for app in apps {
            guard app.baseSha256 == model.sha256 else {
                throw BundleError.damaged("app \(app.name) is for another base")
            }
            guard app.kind != "merged" || app.mode == nil || app.mode == mode else {
                throw BundleError.damaged("app \(app.name) has another mode than the bundle")
            }
            guard app.kind != "slot" || app.files?.isEmpty == false else {
                throw BundleError.damaged("app \(app.name) is a slot without files")
            }
            guard (app.functions ?? [:]).keys.allSatisfy({ Function(rawValue: $0) != nil }) else {
                throw BundleError.damaged("app \(app.name) has unknown functions")
            }
            guard drafts((app.functions ?? [:]).keys, app.mode) else {
                throw BundleError.damaged("app \(app.name): verify needs draft")
            }
        }
        guard !chat.stopIds.isEmpty, chat.stopIds.allSatisfy({ $0 >= 0 }) else {
            throw BundleError.damaged("chat: no stop token, or a negative one")
        }
        guard chat.template != nil || chat.frames?.areWhole == true else {
            throw BundleError.damaged("chat: no template, and no frames of whole conversations")
        }
        guard chat.template?.unicodeScalars.count ?? 0 <= 1 << 20 else {
            throw BundleError.damaged("chat: too long a template")
        }
    }

    private func checkFiles() throws {
        guard !files.isEmpty, files.values.reduce(0, { $0 + $1.size }) <= Self.maxFileBytes else {
            throw BundleError.damaged("files: none, or too large together")
        }
        let folders = Set(
            files.keys.flatMap { path in
                path.indices.filter { path[$0] == "/" }.map { String(path[..<$0]) }
            })
        var seen: Set<String> = ["manifest.json", "manifest.json.sig"]
        for path in Array(files.keys) + folders where !seen.insert(path.lowercased()).inserted {
            throw BundleError.damaged("files: \(path) appears twice where case does not count, or is reserved")
        }
        for path in files.keys where path.split(separator: "/").contains(where: isDevice) {
            throw BundleError.damaged("files: \(path) has a name that Windows reserves")
        }
        for (role, path) in roles ?? [:] where files[path] == nil && !folders.contains(path) {
            throw BundleError.damaged("role \(role): \(path) is not in files")
        }
        for app in apps {
            guard (app.files ?? []).allSatisfy({ files[$0] != nil }), app.folder.map(folders.contains) != false else {
                throw BundleError.damaged("app \(app.name) has files that are not listed")
            }
        }
    }

    private func isDevice(_ segment: Substring) -> Bool {
        let stem = segment.prefix { $0 != "." }.lowercased()
        if ["con", "prn", "aux", "nul"].contains(stem) { return true }
        return stem.count == 4 && (stem.hasPrefix("com") || stem.hasPrefix("lpt")) && stem.last!.isNumber
    }
}

/// Decodes JSON with keys such as `stop_ids`. Throws `BundleError.unreadable`, which begins with `name`.
func decode<Value: Decodable>(_ type: Value.Type, _ data: Data, name: String) throws -> Value {
    let decoder = JSONDecoder()
    decoder.keyDecodingStrategy = .convertFromSnakeCase
    do {
        return try decoder.decode(type, from: data)
    } catch {
        throw BundleError.unreadable("\(name): \(error)")
    }
}
