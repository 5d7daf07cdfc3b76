import Foundation

// The part of Core ML that the package uses, with Apple's signatures, for systems without it. Calls are answered by the
// project's interpreter of packages, a Python process per compiled package.

public enum MLComputeUnits: Int, Sendable {
    case cpuOnly, cpuAndGPU, all, cpuAndNeuralEngine
}

open class MLModelConfiguration {
    public var functionName: String?
    public var computeUnits = MLComputeUnits.all

    public init() {}
}

open class MLModel: @unchecked Sendable {
    private let interpreter: Interpreter
    private let function: String

    private init(interpreter: Interpreter, function: String) {
        self.interpreter = interpreter
        self.function = function
    }

    /// Nothing is compiled, since the interpreter reads packages: a file in the new folder names the package.
    public class func compileModel(at url: URL) async throws -> URL {
        let folder = FileManager.default.temporaryDirectory.appending(path: "\(UUID().uuidString).mlmodelc")
        try FileManager.default.createDirectory(at: folder, withIntermediateDirectories: true)
        try Data(url.path.utf8).write(to: folder.appending(path: "package"))
        return folder
    }

    public class func load(contentsOf url: URL, configuration: MLModelConfiguration) async throws -> MLModel {
        let function = configuration.functionName ?? "main"
        let package = try String(contentsOf: url.appending(path: "package"), encoding: .utf8)
        let interpreter = try Interpreter.of(URL(filePath: package))
        _ = try interpreter.ask(["ask": "function", "function": function])
        return MLModel(interpreter: interpreter, function: function)
    }

    public func makeState() -> MLState {
        guard let state = try? interpreter.ask(["ask": "state"])["state"] as? Int else {
            fatalError("the interpreter makes no state")
        }
        return MLState(number: state)
    }

    public func prediction(from input: any MLFeatureProvider, using state: MLState) throws -> any MLFeatureProvider {
        var inputs: [String: Any] = [:]
        for name in input.featureNames {
            guard let array = input.featureValue(for: name)?.multiArrayValue else { continue }
            inputs[name] = ["shape": array.shape.map(\.intValue), "values": array.values]
        }
        let found = try interpreter.ask(
            ["ask": "run", "function": function, "state": state.number, "inputs": inputs]
        )
        let outputs = found["outputs"] as? [String: [Double]] ?? [:]
        return try MLDictionaryFeatureProvider(
            dictionary: outputs.mapValues { MLMultiArray(shape: [$0.count], values: $0) }
        )
    }
}

public final class MLState: Sendable {
    let number: Int

    init(number: Int) { self.number = number }
}

public protocol MLFeatureProvider {
    var featureNames: Set<String> { get }
    func featureValue(for featureName: String) -> MLFeatureValue?
}

open class MLFeatureValue {
    public let multiArrayValue: MLMultiArray?

    init(_ array: MLMultiArray?) { multiArrayValue = array }
}

open class MLDictionaryFeatureProvider: MLFeatureProvider {
    public let dictionary: [String: MLFeatureValue]

    /// Throws for a value that is no array, as Apple's does for types that no feature has.
    public init(dictionary: [String: Any]) throws {
        self.dictionary = try dictionary.mapValues { value in
            guard let array = value as? MLMultiArray else { throw CocoaError(.featureUnsupported) }
            return MLFeatureValue(array)
        }
    }

    public var featureNames: Set<String> { Set(dictionary.keys) }

    public func featureValue(for featureName: String) -> MLFeatureValue? { dictionary[featureName] }
}

open class MLMultiArray {
    public let shape: [NSNumber]
    /// Those of 32-bit integers and floats are exact.
    let values: [Double]

    public convenience init<Scalar: MLShapedArrayScalar>(_ shapedArray: MLShapedArray<Scalar>) {
        self.init(shape: shapedArray.shape, values: shapedArray.scalars.map(\.number))
    }

    init(shape: [Int], values: [Double]) {
        precondition(values.count == shape.reduce(1, *), "\(values.count) values for the shape \(shape)")
        self.shape = shape.map { NSNumber(value: $0) }
        self.values = values
    }
}

public protocol MLShapedArrayScalar: Sendable {
    init(_ number: Double)
    var number: Double { get }
}

extension Int32: MLShapedArrayScalar {
    public var number: Double { Double(self) }
}

extension Float: MLShapedArrayScalar {
    public var number: Double { Double(self) }
}

public struct MLShapedArray<Scalar: MLShapedArrayScalar>: Sendable {
    public let shape: [Int]
    public let scalars: [Scalar]

    public init(scalars: some Sequence<Scalar>, shape: [Int]) {
        self.scalars = Array(scalars)
        self.shape = shape
    }

    public init(converting multiArray: MLMultiArray) {
        self.init(scalars: multiArray.values.map(Scalar.init), shape: multiArray.shape.map(\.intValue))
    }
}
