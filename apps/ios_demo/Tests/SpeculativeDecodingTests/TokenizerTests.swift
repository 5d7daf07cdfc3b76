import XCTest

@testable import SpeculativeDecoding

/// Ten thousand texts, with the ids of Hugging Face's tokenizers.
final class TokenizerTests: XCTestCase {
    private struct Expected: Decodable {
        struct Decoded: Decodable {
            let ids: [Int32]
            let text: String
        }

        let ids: [[Int32]]
        let decoded: [Decoded]
    }

    func testBase7m() throws { try check("base-7m") }
    func testSmolLM2() throws { try check("smollm2") }
    func testWordsOfLlama3() throws { try check("llama3") }
    func testWordsOfQwen2() throws { try check("qwen2") }

    private func check(_ name: String) throws {
        let texts = try Fixtures.read([String].self, "tokenizers/texts.json")
        let expected = try Fixtures.read(Expected.self, "tokenizers/\(name)/ids.json")
        let tokenizer = try Tokenizer(file: Fixtures.folder.appending(path: "tokenizers/\(name)/tokenizer.json"))
        let wrong = zip(texts, expected.ids).filter { tokenizer.encode($0) != $1 }
        XCTAssertEqual(texts.count, 10_000)
        XCTAssertEqual(wrong.count, 0, describe(wrong.first.map { ($0, tokenizer.encode($0), $1) }))
        for sample in expected.decoded {
            XCTAssertEqual(String(decoding: sample.ids.flatMap(tokenizer.bytes), as: UTF8.self), sample.text)
        }
    }

    private func describe(_ case: (text: String, found: [Int32], expected: [Int32])?) -> String {
        guard let `case` else { return "" }
        let scalars = `case`.text.unicodeScalars.map { String($0.value, radix: 16) }
        return "\(scalars.joined(separator: " ")): \(`case`.found), not \(`case`.expected)"
    }

    func testUnknownOptionsAreRefused() throws {
        let whole = """
            {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "unk_token": null},
             "decoder": {"type": "ByteLevel"}, "normalizer": null,
             "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
             "added_tokens": [{"id": 3, "content": "<x>", "special": true}]}
            """
        XCTAssertEqual(try tokenizer(whole).encode("aab<x>b"), [0, 2, 3, 1])
        for (from, to) in [
            ("\"BPE\"", "\"Unigram\""), ("\"unk_token\": null", "\"unk_token\": \"a\""),
            ("a b", "a c"), ("a b", "a b "),
            ("\"normalizer\": null", "\"normalizer\": {\"type\": \"Lowercase\"}"),
            ("\"decoder\": {\"type\": \"ByteLevel\"}", "\"decoder\": null"),
            ("{\"type\": \"ByteLevel\", \"add", "{\"type\": \"Metaspace\", \"add"), ("space\": false", "space\": true"),
            ("\"special\": true", "\"lstrip\": true"), ("\"id\": 3", "\"id\": 3000000000"), ("\"<x>\"", "\"ab\""),
            ("{\"type\": \"ByteLevel\", \"add", "{\"type\": \"Sequence\", \"pretokenizers\": [], \"add"),
        ] {
            XCTAssertTrue(whole.contains(from))
            XCTAssertThrowsError(try tokenizer(whole.replacingOccurrences(of: from, with: to)), to)
        }
    }

    private func tokenizer(_ text: String) throws -> Tokenizer {
        try Tokenizer(JSON(Data(text.utf8), name: "tokenizer.json"))
    }
}
