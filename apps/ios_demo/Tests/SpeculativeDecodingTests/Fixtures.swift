import Foundation
import XCTest

/// What `make swift-test` has Python write.
enum Fixtures {
    static let folder = URL(filePath: #filePath).appending(path: "../../../../../build/swift").standardizedFileURL

    /// Skips the test where nothing was written.
    static func read<Value: Decodable>(_ type: Value.Type, _ name: String) throws -> Value {
        let file = folder.appending(path: name)
        guard FileManager.default.fileExists(atPath: file.path) else { throw XCTSkip("make swift-test writes \(name)") }
        let decoder = JSONDecoder()
        decoder.keyDecodingStrategy = .convertFromSnakeCase
        return try decoder.decode(type, from: Data(contentsOf: file))
    }
}
