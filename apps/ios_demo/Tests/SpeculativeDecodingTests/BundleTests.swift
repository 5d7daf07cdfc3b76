import XCTest

@testable import SpeculativeDecoding

/// A bundle broken in many ways is refused where Python refuses it, and only there.
final class BundleTests: XCTestCase {
    private struct Verdicts: Decodable {
        struct Verdict: Decodable {
            let folder: String
            let done: String
            let accepted: Bool
        }

        let verdicts: [Verdict]
    }

    func testBrokenBundles() throws {
        let verdicts = try Fixtures.read(Verdicts.self, "broken/verdicts.json").verdicts
        XCTAssertGreaterThan(verdicts.count, 200)
        for verdict in verdicts {
            let folder = Fixtures.folder.appending(path: "broken/\(verdict.folder)")
            do {
                let bundle = try ModelBundle(folder: folder)
                _ = try Tokenizer(file: bundle.url(role: "tokenizer"))
                XCTAssertTrue(verdict.accepted, "\(verdict.folder): \(verdict.done)")
            } catch let error as BundleError {
                XCTAssertFalse(verdict.accepted, "\(verdict.folder): \(verdict.done): \(error.localizedDescription)")
            }
        }
    }

    func testAShortStepIsSaidToBeUnsupported() throws {
        let file = Fixtures.folder.appending(path: "broken/whole/manifest.json")
        let (text, plain) = (try String(contentsOf: file, encoding: .utf8), "\"\(Function.plain.rawValue)\"")
        XCTAssertNoThrow(try Manifest(Data(text.utf8)))
        let other = text.replacingOccurrences(of: plain, with: "\"\(Function.stepShort)\"")
        XCTAssertThrowsError(try Manifest(Data(other.utf8))) { error in
            XCTAssertTrue(error.localizedDescription.contains("not supported: step_short"), "\(error)")
        }
    }
}
