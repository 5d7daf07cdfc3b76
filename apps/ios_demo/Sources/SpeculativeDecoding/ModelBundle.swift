import Foundation

/// A bundle folder made by `ssdevice export --target coreml`, checked before anything in it is used.
public struct ModelBundle: Sendable {
    static let maxFiles = 4096

    public let folder: URL
    public let manifest: Manifest
    public let settings: Settings

    /// `coreml.json`: what a host of Core ML needs to know beside the manifest.
    public struct Settings: Decodable, Sendable {
        public let computeUnits: String
    }

    /// Reads the manifest and compares names, sizes and hashes of all files with it.
    public init(folder: URL) throws {
        self.folder = folder
        let file = folder.appending(path: "manifest.json")
        let attributes = try? FileManager.default.attributesOfItem(atPath: file.path)
        guard attributes?[.type] as? FileAttributeType == .typeRegular else {
            throw BundleError.unreadable("\(folder.lastPathComponent): it has no manifest.json")
        }
        guard attributes?[.size] as? Int ?? .max <= Manifest.maxBytes else {
            throw BundleError.unreadable("manifest.json: more than \(Manifest.maxBytes) bytes")
        }
        manifest = try Manifest(Self.content(of: file))
        try Self.check(manifest.files, in: folder)
        guard let path = manifest.roles?["settings"], manifest.files[path] != nil else {
            throw BundleError.damaged("no file has the role settings")
        }
        settings = try decode(Settings.self, Self.content(of: folder.appending(path: path)), name: path)
    }

    /// The file or folder with a role.
    public func url(role: String) throws -> URL {
        guard let path = manifest.roles?[role] else { throw BundleError.damaged("no file has the role \(role)") }
        return folder.appending(path: path)
    }

    /// The SHA-256 of the names and hashes of all files of a role.
    public func hash(role: String) throws -> String {
        guard let path = manifest.roles?[role] else { throw BundleError.damaged("no file has the role \(role)") }
        let files = manifest.files.filter { $0.key == path || $0.key.hasPrefix(path + "/") }
        let lines = files.sorted { $0.key < $1.key }.map { "\($0.key) \($0.value.sha256)\n" }
        return sha256(of: Data(lines.joined().utf8))
    }

    /// An app by name; nil is the default one.
    public func app(_ wanted: String? = nil) throws -> Manifest.App {
        let name = wanted ?? manifest.defaultApp
        guard let app = manifest.apps.first(where: { $0.name == name }) else {
            throw BundleError.request("no app \(name): the bundle has \(manifest.apps.map(\.name))")
        }
        return app
    }

    /// The contract's functions of an app, and the package's names of them.
    public func functions(of app: Manifest.App) -> [Function: String] {
        let own = app.functions ?? [:]
        let names = own.isEmpty ? Dictionary(uniqueKeysWithValues: manifest.functions.map { ($0.name, $0.name) }) : own
        return Dictionary(
            uniqueKeysWithValues: names.compactMap { name, inPackage in
                Function(rawValue: name).map { ($0, inPackage) }
            })
    }

    private static func content(of file: URL) throws -> Data {
        do {
            return try Data(contentsOf: file)
        } catch {
            throw BundleError.unreadable("\(file.lastPathComponent): \(error.localizedDescription)")
        }
    }

    private static func check(_ files: [String: Manifest.File], in folder: URL) throws {
        let found = try sizes(in: folder)
        for (name, file) in files {
            guard let size = found[name] else { throw BundleError.damaged("\(name) is missing") }
            guard size == file.size else { throw BundleError.damaged("\(name) has \(size) bytes, not \(file.size)") }
        }
        for name in found.keys where files[name] == nil && name != "manifest.json" && name != "manifest.json.sig" {
            throw BundleError.damaged("\(name) is not listed in the manifest")
        }
        for (name, file) in files {
            guard try sha256(of: folder.appending(path: name)) == file.sha256 else {
                throw BundleError.damaged("\(name): its sha256 is not the one in the manifest")
            }
        }
    }

    /// Path -> size of all files. Throws for links, pipes and whatever else is neither a file nor a folder.
    private static func sizes(in folder: URL) throws -> [String: Int] {
        var found: [String: Int] = [:]
        var waiting = [""]
        var seen = 0
        while let inside = waiting.popLast() {
            let names = try FileManager.default.contentsOfDirectory(atPath: folder.path + "/" + inside)
            seen += names.count
            guard seen <= 2 * maxFiles else { throw BundleError.damaged("more than \(2 * maxFiles) files and folders") }
            for path in names.map({ inside + $0 }) {
                let attributes = try FileManager.default.attributesOfItem(atPath: folder.path + "/" + path)
                switch attributes[.type] as? FileAttributeType {
                case .typeDirectory? where path.filter({ $0 == "/" }).count < 16: waiting.append(path + "/")
                case .typeRegular?: found[path] = attributes[.size] as? Int ?? -1
                default: throw BundleError.damaged("\(path) is a link, too deep, or not a plain file")
                }
            }
        }
        return found
    }
}
