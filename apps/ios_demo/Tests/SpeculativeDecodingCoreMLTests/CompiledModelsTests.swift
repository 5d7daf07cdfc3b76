import CoreML
import Foundation
import SpeculativeDecoding
import XCTest

@testable import SpeculativeDecodingCoreML

/// A package is compiled once, and again when it is another one. Every compilation makes another folder.
final class CompiledModelsTests: XCTestCase {
    private let folder = FileManager.default.temporaryDirectory.appending(path: UUID().uuidString)
    private lazy var models = CompiledModels(folder: folder)

    override func tearDown() {
        try? FileManager.default.removeItem(at: folder)
    }

    /// A mark in a compiled model is gone if it was compiled again.
    private func isKept(_ model: URL) -> Bool {
        let mark = model.appending(path: "mark")
        defer { try? Data().write(to: mark) }
        return FileManager.default.fileExists(atPath: mark.path)
    }

    private func compiled(_ name: String, _ key: String) async throws -> URL {
        #if os(Linux)
            return try await models.model(name: name, key: key, package: folder)
        #else
            throw XCTSkip("there is no small package for Apple's compiler here")
        #endif
    }

    func testAPackageIsCompiledOnce() async throws {
        for expected in [false, true, true] {
            let kept = isKept(try await compiled("a", "1"))
            XCTAssertEqual(kept, expected)
        }
        let another = isKept(try await compiled("b", "1"))
        XCTAssertFalse(another)
        let first = isKept(try await compiled("a", "1"))
        XCTAssertTrue(first)
    }

    func testAChangedPackageReplacesTheOldOne() async throws {
        let old = try await compiled("a", "1")
        let new = try await compiled("a", "2")
        XCTAssertFalse(FileManager.default.fileExists(atPath: old.path))
        XCTAssertTrue(FileManager.default.fileExists(atPath: new.path))
        let again = isKept(try await compiled("a", "1"))
        XCTAssertFalse(again)
    }

    func testWhatBelongsToNoBundleIsRemoved() async throws {
        try models.removeAll(but: [])
        let (one, other) = (try await compiled("a", "1"), try await compiled("b", "1"))
        try models.removeAll(but: [URL(filePath: "/bundles/b")])
        XCTAssertFalse(FileManager.default.fileExists(atPath: one.path))
        XCTAssertTrue(FileManager.default.fileExists(atPath: other.path))
    }

    func testTheKeyFollowsTheContent() async throws {
        #if os(Linux)
            let path = "../../../../../build/swift/broken/whole"
            let made = URL(filePath: #filePath).appending(path: path).standardizedFileURL
            guard FileManager.default.fileExists(atPath: made.path) else { throw XCTSkip("make swift-test writes it") }
            let bundle = try ModelBundle(folder: made)
            XCTAssertNotEqual(try bundle.hash(role: "model"), try bundle.hash(role: "tokenizer"))
            let model = try await models.model(of: bundle)
            XCTAssertTrue(model.lastPathComponent.hasPrefix(try bundle.hash(role: "model")))
            let again = try await models.model(of: bundle)
            XCTAssertEqual(model, again)
        #endif
    }
}
