import CoreML
import Foundation
import SpeculativeDecoding

/// Packages that were compiled at an earlier start, as `NAME/KEY.mlmodelc` in a folder of the app.
///
/// The key is the hash of the package and names the system, whose compiler made it. Of a name only the newest stays.
public struct CompiledModels: Sendable {
    /// In Application Support, which the system does not empty.
    public static var standard: CompiledModels {
        let places = FileManager.default.urls(for: .applicationSupportDirectory, in: .userDomainMask)
        return CompiledModels(
            folder: (places.first ?? FileManager.default.temporaryDirectory).appending(path: "CompiledModels"))
    }

    private let folder: URL

    public init(folder: URL) {
        self.folder = folder
    }

    /// A bundle's package, compiled now unless it is there.
    public func model(of bundle: ModelBundle) async throws -> URL {
        let system = ProcessInfo.processInfo.operatingSystemVersion
        let version = "\(system.majorVersion).\(system.minorVersion).\(system.patchVersion)"
        let key = "\(try bundle.hash(role: "model"))-\(version)"
        let name = bundle.folder.lastPathComponent
        return try await model(name: name, key: key, package: bundle.url(role: "model"))
    }

    func model(name: String, key: String, package: URL) async throws -> URL {
        let place = folder.appending(path: name)
        let kept = place.appending(path: "\(key).mlmodelc")
        if FileManager.default.fileExists(atPath: kept.path) { return kept }
        let compiled = try await MLModel.compileModel(at: package)
        try? FileManager.default.removeItem(at: place)
        try FileManager.default.createDirectory(at: place, withIntermediateDirectories: true)
        #if canImport(Darwin)
            var (unsaved, values) = (place, URLResourceValues())
            values.isExcludedFromBackup = true  // it can be made again
            try unsaved.setResourceValues(values)
        #endif
        try FileManager.default.moveItem(at: compiled, to: kept)
        return kept
    }

    /// Removes what was compiled for bundles that are gone. `bundles`: the folders that are there.
    public func removeAll(but bundles: [URL]) throws {
        guard FileManager.default.fileExists(atPath: folder.path) else { return }
        let names = Set(bundles.map(\.lastPathComponent))
        for name in try FileManager.default.contentsOfDirectory(atPath: folder.path) where !names.contains(name) {
            try FileManager.default.removeItem(at: folder.appending(path: name))
        }
    }
}
