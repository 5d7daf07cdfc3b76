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
    /// `compiled`: the bundle's package, compiled. It must stay where it is: Core ML may read from it later. `samples`:
    /// also those for hosts that choose tokens, which take memory.
    public init(bundle: ModelBundle, app: Manifest.App, compiled: URL, samples: Bool = false) async throws {
        var models: [Function: MLModel] = [:]
        for (function, name) in bundle.functions(of: app) where samples || !function.chooses {
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

    public func call(_ function: Function, _ inputs: Values) throws -> Values {
        guard let model = models[function] else { throw BundleError.unsupported("the app has no \(function.rawValue)") }
        var features: [String: MLMultiArray] = [:]
        for (tensor, ids) in inputs.ids {
            let shape = geometry.shape(of: tensor, in: function)
            features[tensor.rawValue] = MLMultiArray(MLShapedArray(scalars: ids, shape: shape))
        }
        for (tensor, floats) in inputs.floats {
            let shape = geometry.shape(of: tensor, in: function)
            features[tensor.rawValue] = MLMultiArray(MLShapedArray(scalars: floats, shape: shape))
        }
        let out = try model.prediction(from: MLDictionaryFeatureProvider(dictionary: features), using: state)
        return function.outputs.reduce(into: Values()) { result, tensor in
            guard let array = out.featureValue(for: tensor.rawValue)?.multiArrayValue else { return }
            if tensor.floats {
                result.floats[tensor] = MLShapedArray<Float>(converting: array).scalars
            } else {
                result.ids[tensor] = MLShapedArray<Int32>(converting: array).scalars
            }
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
    /// Opens a bundle folder. `app`: nil for its default one. The apps of a bundle share its weights on disk. `samples`:
    /// also opens the functions for sampling; throws `BundleError.request` if the bundle has none.
    public init(
        folder: URL, app: String? = nil, samples: Bool = false, compiled models: CompiledModels = .standard
    ) async throws {
        let bundle = try ModelBundle(folder: folder)
        guard !samples || bundle.manifest.functions.contains(where: { $0.name == Function.verifyPlain.rawValue }) else {
            throw BundleError.request("this bundle's graph chooses tokens; for sampling export it with --choose host")
        }
        let compiled = try await models.model(of: bundle)
        try await self.init(bundle: bundle, app: app) { app in
            let engine = try await CoreMLEngine(bundle: bundle, app: app, compiled: compiled, samples: samples)
            let manifest = bundle.manifest
            return Conversation(engine: engine, geometry: manifest.geometry, streams: manifest.mode != nil)
        }
    }
}
