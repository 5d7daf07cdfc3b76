import CoreML
import Foundation
import SpeculativeDecoding

/// The functions of one app of a package on one state, which holds the KV cache.
public final class CoreMLEngine: Engine {
    public let functions: Set<Function>
    private let geometry: Geometry
    private let models: [Function: MLModel]
    private let state: MLState

    /// Loads an app's functions; the first time on a device this can take minutes.
    ///
    /// `compiled`: the bundle's package, compiled. It must stay where it is: Core ML may read from it later.
    public init(bundle: ModelBundle, app: Manifest.App, compiled: URL) async throws {
        var models: [Function: MLModel] = [:]
        // The graph chooses here, so functions for hosts that choose would only take memory.
        for (function, name) in bundle.functions(of: app) where !function.chooses {
            let configuration = MLModelConfiguration()
            configuration.functionName = name
            configuration.computeUnits = MLComputeUnits(name: bundle.settings.computeUnits)
            models[function] = try await MLModel.load(contentsOf: compiled, configuration: configuration)
        }
        guard let prefill = models[.prefill] else { throw BundleError.damaged("app \(app.name) has no prefill") }
        self.models = models
        functions = Set(models.keys)
        geometry = bundle.manifest.geometry
        // One for all functions: they declare the same tensors.
        state = prefill.makeState()
    }

    public func call(_ function: Function, _ inputs: [Tensor: [Int32]]) throws -> [Tensor: [Int32]] {
        guard let model = models[function] else { throw BundleError.unsupported("the app has no \(function.rawValue)") }
        let features = inputs.map { tensor, values in
            let shape = geometry.shape(of: tensor, in: function)
            return (tensor.rawValue, MLMultiArray(MLShapedArray(scalars: values, shape: shape)))
        }
        let given = try MLDictionaryFeatureProvider(dictionary: Dictionary(uniqueKeysWithValues: features))
        let out = try model.prediction(from: given, using: state)
        return function.outputs.reduce(into: [:]) { result, tensor in
            guard let array = out.featureValue(for: tensor.rawValue)?.multiArrayValue else { return }
            result[tensor] = MLShapedArray<Int32>(converting: array).scalars
        }
    }
}

extension MLComputeUnits {
    /// By the name in `coreml.json`.
    init(name: String) {
        switch name {
        case "cpu_only": self = .cpuOnly
        case "cpu_and_gpu": self = .cpuAndGPU
        case "cpu_and_ne": self = .cpuAndNeuralEngine
        default: self = .all
        }
    }
}

extension Generator {
    /// Opens a bundle folder. `app`: nil for its default one. The apps of a bundle share its weights on disk.
    public init(folder: URL, app: String? = nil, compiled models: CompiledModels = .standard) async throws {
        let bundle = try ModelBundle(folder: folder)
        let compiled = try await models.model(of: bundle)
        try await self.init(bundle: bundle, app: app) { app in
            let engine = try await CoreMLEngine(bundle: bundle, app: app, compiled: compiled)
            return Conversation(engine: engine, geometry: bundle.manifest.geometry)
        }
    }
}
