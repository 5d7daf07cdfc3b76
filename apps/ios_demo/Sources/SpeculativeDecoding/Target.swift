import CoreML
import Foundation

/// The functions of one app of a bundle on one cache. It moves integers; everything else is in the package.
///
/// Not for several tasks at once: an actor keeps calls in order.
public actor Target {
    public let geometry: ModelBundle.Manifest.Geometry
    /// Committed rows of the cache; going back is lowering it.
    public private(set) var length = 0
    /// What the next step will verify, γ rows of k ids.
    private var drafts: [Int32]

    private let prefillModel: MLModel
    private let stepModel: MLModel?
    private let plainModel: MLModel?
    private let state: MLState

    /// Compiles and loads the package; the first time on a device this can take minutes.
    ///
    /// `app`: nil for the default one. Apps of one package share its weights on disk.
    public init(bundle: ModelBundle, app: String? = nil) async throws {
        geometry = bundle.manifest.geometry
        drafts = Array(repeating: 0, count: geometry.gamma * geometry.k)
        // Compiled into a temporary folder, which must outlive the models: Core ML may read from it later.
        let compiled = try await MLModel.compileModel(at: bundle.url(role: "model"))

        func load(_ function: String) async throws -> MLModel {
            let configuration = MLModelConfiguration()
            configuration.functionName = function
            configuration.computeUnits = Self.units(bundle.settings.computeUnits)
            return try await MLModel.load(contentsOf: compiled, configuration: configuration)
        }

        func loadIfThere(_ function: String) async throws -> MLModel? {
            guard let name = try bundle.function(function, app: app) else { return nil }
            return try await load(name)
        }

        guard let prefill = try await loadIfThere("prefill") else { throw BundleError.damaged("no prefill") }
        prefillModel = prefill
        stepModel = try await loadIfThere("step")
        plainModel = try await loadIfThere("step_plain")
        // One state for all functions: they declare the same tensors.
        state = prefillModel.makeState()
    }

    public func reset() {
        length = 0
    }

    /// `count` emitted tokens became part of the text; all but the last have their rows in the cache.
    public func advance(by count: Int) {
        length += count
    }

    /// Commits a prompt after what is committed; the first token of the answer.
    public func prefill(_ prompt: [Int32]) async throws -> Int32 {
        var root: Int32 = 0
        for start in stride(from: 0, to: prompt.count, by: geometry.chunk) {
            let chunk = Array(prompt[start..<min(start + geometry.chunk, prompt.count)])
            let padded = chunk + Array(repeating: 0, count: geometry.chunk - chunk.count)
            let out = try await run(
                prefillModel,
                ["chunk": Self.array(padded), "valid": Self.array([Int32(chunk.count)])]
            )
            root = try Self.integers(out, "next_root")[0]
            if stepModel != nil { drafts = try Self.integers(out, "next_drafts") }
            length += chunk.count
        }
        return root
    }

    /// Verifies the drafts after `root`: 1 to A tokens.
    public func step(_ root: Int32, drafts given: [Int32]? = nil) async throws -> [Int32] {
        guard let stepModel else { throw BundleError.unsupported("speculation: the bundle has no step") }
        let out = try await run(
            stepModel,
            [
                "root": Self.array([root]),
                "drafts": Self.array(given ?? drafts, shape: [geometry.gamma, geometry.k]),
            ]
        )
        drafts = try Self.integers(out, "next_drafts")
        let count = try Int(Self.integers(out, "count")[0])
        return try Array(Self.integers(out, "tokens").prefix(count))
    }

    /// The token after `root`.
    public func plainStep(_ root: Int32) async throws -> Int32 {
        guard let plainModel else { return try await step(root)[0] }
        return try await Self.integers(run(plainModel, ["root": Self.array([root])]), "tokens")[0]
    }

    /// Lowers or raises the committed length, for checks that give every length themselves.
    public func setLength(_ length: Int) {
        self.length = length
    }

    public var nextDrafts: [Int32] { drafts }

    private func run(_ model: MLModel, _ inputs: [String: MLMultiArray]) async throws -> MLFeatureProvider {
        var all = inputs
        all["length"] = Self.array([Int32(length)])
        return try await model.prediction(from: MLDictionaryFeatureProvider(dictionary: all), using: state)
    }

    private static func array(_ values: [Int32], shape: [Int]? = nil) -> MLMultiArray {
        MLMultiArray(MLShapedArray(scalars: values, shape: shape ?? [values.count]))
    }

    private static func integers(_ output: MLFeatureProvider, _ name: String) throws -> [Int32] {
        guard let array = output.featureValue(for: name)?.multiArrayValue else {
            throw BundleError.damaged("the package gives no \(name)")
        }
        return MLShapedArray<Int32>(converting: array).scalars
    }

    private static func units(_ name: String) -> MLComputeUnits {
        switch name {
        case "cpu_only": .cpuOnly
        case "cpu_and_gpu": .cpuAndGPU
        case "cpu_and_ne": .cpuAndNeuralEngine
        default: .all
        }
    }
}
