import XCTest

@testable import SpeculativeDecoding

final class TextTests: XCTestCase {
    func testCharactersAreWhole() {
        var text = UTF8Stream()
        let bytes = Array("aé🙂".utf8)
        XCTAssertEqual(bytes.map { text.push([$0]) }, ["a", "", "é", "", "", "", "🙂"])
        XCTAssertEqual(text.flush(), "")
        XCTAssertEqual(UTF8Stream.incompleteSuffix([0xF0, 0x9F]), 2)
        XCTAssertEqual(UTF8Stream.incompleteSuffix([0x61]), 0)
    }

    func testPiecesAreTheWholeText() {
        var random = SystemRandomNumberGenerator()
        let some: [UInt8] = [0x41, 0x80, 0xBF, 0xC3, 0xE2, 0x82, 0xF0, 0x9F, 0xFF]
        for _ in 0..<2000 {
            let bytes = (0..<12).map { _ in some.randomElement(using: &random)! }
            var text = UTF8Stream()
            let pieces = bytes.map { text.push([$0]) }.joined() + text.flush()
            XCTAssertEqual(pieces, String(decoding: bytes, as: UTF8.self), "\(bytes)")
        }
    }

    func testTheStopStringThatEndsFirstStops() {
        for cut in 0...8 {
            var stops = StopStrings(["bcd", "cd", "xyz"])
            let text = Array("aabcxyde".utf8) + "xbcdxyz".utf8
            let first = String(decoding: text[..<cut], as: UTF8.self)
            let second = String(decoding: text[cut...], as: UTF8.self)
            XCTAssertEqual(stops.push(first) + stops.push(second), "aabcxydex")
            XCTAssertTrue(stops.found)
        }
        var stops = StopStrings(["bcd"])
        XCTAssertEqual(stops.push("abc"), "a")
        XCTAssertEqual(stops.flush(), "bc")
    }

    func testASpecialTokenIsFoundAndNotShown() {
        var stops = StopStrings(["a<|eom|>"])
        XCTAssertEqual(stops.push("ba") + stops.push("<|e", shown: false), "b")
        XCTAssertEqual(stops.push("d"), "ad")
        XCTAssertEqual(stops.push("a") + stops.push("<|eom|>", shown: false) + stops.flush(), "")
        XCTAssertTrue(stops.found)
    }

    func testSHA256() throws {
        let million = String(repeating: "a", count: 1_000_000)
        for (text, expected) in [
            ("", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            ("abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
            (
                "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
                "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
            ),
            (million, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"),
        ] {
            let file = FileManager.default.temporaryDirectory.appending(path: UUID().uuidString)
            try Data(text.utf8).write(to: file)
            defer { try? FileManager.default.removeItem(at: file) }
            XCTAssertEqual(try sha256(of: file), expected)
        }
    }

    func testJSONThatReadersDisagreeOnIsRefused() {
        for text in [
            "", "[", "[1,]", #"{"a":1,"a":2}"#, #"{"a":1,"\u0061":2}"#, "nul", "NaN", "-Infinity", "1e999", "01", "1.",
            ".5",
            "+1", #""\ud800""#, #""\udc00\ud800""#, #""\ud800\u0041""#, "\"\u{1}\"", "'a'", "1 2", "/**/1", "\u{FEFF}1",
            #""\x""#, String(repeating: "[", count: 40) + String(repeating: "]", count: 40),
            String(repeating: "1", count: 5000),
        ] {
            XCTAssertThrowsError(try JSON(Data(text.utf8), name: "text"), text.prefix(40).description)
        }
        XCTAssertThrowsError(try JSON(Data([0x22, 0xFF, 0x22]), name: "text"))
    }

    func testJSON() throws {
        let items = #"[1, -0, 2.5, 1e2, true, null, "\ud83d\ude42\n\/"]"#
        let json = try JSON(Data(" {\"\u{E9}\": \(items), \"e\u{301}\": {}}\n".utf8), name: "text")
        let read = try XCTUnwrap(json["\u{E9}"]?.array)
        XCTAssertEqual(read.map(\.integer), [1, 0, nil, nil, nil, nil, nil])
        XCTAssertEqual(read.last?.string, "🙂\n/")
        XCTAssertEqual(json.object?.count, 2)
    }
}
