import CryptoKit
import Foundation

/// What can be wrong with a bundle, in words for the person who made it.
public enum BundleError: LocalizedError {
    case unreadable(String)
    case unsupported(String)
    case damaged(String)

    public var errorDescription: String? {
        switch self {
        case .unreadable(let what): "cannot read \(what)"
        case .unsupported(let what): "not supported: \(what)"
        case .damaged(let what): "damaged: \(what)"
        }
    }
}

/// A bundle folder made by `ssdevice export --target coreml`, checked before anything in it is used.
public struct ModelBundle: Sendable {
    public let folder: URL
    public let manifest: Manifest
    public let settings: Settings

    /// `manifest.json`, as far as a host needs it.
    public struct Manifest: Decodable, Sendable {
        public struct Geometry: Decodable, Sendable {
            public let gamma: Int
            public let k: Int
            public let context: Int
            public let chunk: Int
        }

        public struct Function: Decodable, Sendable {
            public let name: String
        }

        public struct App: Decodable, Sendable {
            public let name: String
            /// The package's names of the contract's functions; empty where they are the contract's own.
            public let functions: [String: String]
        }

        public struct Chat: Decodable, Sendable {
            public let stopIds: [Int32]
        }

        public struct File: Decodable, Sendable {
            public let size: Int
            public let sha256: String
        }

        public let schemaVersion: Int
        public let target: String
        public let precision: String
        public let geometry: Geometry
        public let functions: [Function]
        public let chat: Chat
        public let apps: [App]
        public let defaultApp: String
        public let roles: [String: String]
        public let files: [String: File]
    }

    /// `coreml.json`: what Core ML alone needs to know.
    public struct Settings: Decodable, Sendable {
        public struct Prompt: Decodable, Sendable {
            public let before: String
            public let after: String
        }

        public let computeUnits: String
        /// By app.
        public let prompts: [String: Prompt]
    }

    /// Reads the manifest and compares every file's size and hash with it.
    public init(folder: URL) throws {
        self.folder = folder
        manifest = try Self.read(Manifest.self, at: folder.appending(path: "manifest.json"))
        guard manifest.schemaVersion == 1, manifest.target == "coreml" else {
            throw BundleError.unsupported("a \(manifest.target) bundle of schema \(manifest.schemaVersion)")
        }
        for (name, file) in manifest.files {
            try Self.check(name, file, in: folder)
        }
        guard let path = manifest.roles["settings"], manifest.files[path] != nil else {
            throw BundleError.damaged("no settings")
        }
        settings = try Self.read(Settings.self, at: folder.appending(path: path))
    }

    /// The file or folder with a role.
    public func url(role: String) throws -> URL {
        guard let path = manifest.roles[role] else { throw BundleError.damaged("no file is the \(role)") }
        let known = manifest.files.keys.contains { $0 == path || $0.hasPrefix(path + "/") }
        guard known else { throw BundleError.damaged("\(path) is not listed") }
        return folder.appending(path: path)
    }

    /// The package's name of one of the contract's functions for an app (nil: the default one), if it has it.
    public func function(_ name: String, app wanted: String? = nil) throws -> String? {
        let app = try self.app(wanted)
        if !app.functions.isEmpty { return app.functions[name] }
        return manifest.functions.contains { $0.name == name } ? name : nil
    }

    /// What stands before and after the user's text in a prompt of an app.
    public func prompt(app wanted: String? = nil) throws -> Settings.Prompt {
        let name = try app(wanted).name
        guard let prompt = settings.prompts[name] else { throw BundleError.damaged("no prompt for app \(name)") }
        return prompt
    }

    private func app(_ wanted: String?) throws -> Manifest.App {
        let name = wanted ?? manifest.defaultApp
        guard let app = manifest.apps.first(where: { $0.name == name }) else {
            throw BundleError.unsupported("app \(name): the bundle has \(manifest.apps.map(\.name))")
        }
        return app
    }

    static func read<Value: Decodable>(_ type: Value.Type, at url: URL) throws -> Value {
        let decoder = JSONDecoder()
        decoder.keyDecodingStrategy = .convertFromSnakeCase
        do {
            return try decoder.decode(type, from: Data(contentsOf: url))
        } catch {
            throw BundleError.unreadable("\(url.lastPathComponent): \(error)")
        }
    }

    private static func check(_ name: String, _ file: Manifest.File, in folder: URL) throws {
        let parts = name.split(separator: "/", omittingEmptySubsequences: false)
        guard parts.allSatisfy({ !$0.isEmpty && $0 != "." && $0 != ".." }) else {
            throw BundleError.damaged("the path \(name) leaves the bundle")
        }
        let data: Data
        do {
            data = try Data(contentsOf: folder.appending(path: name), options: .mappedIfSafe)
        } catch {
            throw BundleError.unreadable(name)
        }
        guard data.count == file.size else { throw BundleError.damaged("\(name) has \(data.count) bytes") }
        let hash = SHA256.hash(data: data).map { String(format: "%02x", $0) }.joined()
        guard hash == file.sha256 else { throw BundleError.damaged("\(name): its hash is not the manifest's") }
    }
}
