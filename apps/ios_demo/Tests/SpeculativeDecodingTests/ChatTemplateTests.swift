import XCTest

@testable import SpeculativeDecoding

/// Chat templates give the prompts that Python renders, or are refused.
final class ChatTemplateTests: XCTestCase {
    private struct Recording: Decodable {
        struct Case: Decodable {
            struct Message: Decodable {
                let role: String
                let content: String
            }

            let template: String
            let messages: [Message]
            /// Whether the template must be understood; nil if it may be refused.
            let known: Bool?
            /// Nil where Python refuses it.
            let text: String?
        }

        let cases: [Case]
    }

    private let names: [String: JSON] = [
        "bos_token": .string("<s>"), "eos_token": .string("</s>"), "enable_thinking": .bool(false),
        "numbers": .array([.integer(3), .integer(1), .integer(2)]),
    ]

    func testPromptsAreThoseOfPython() throws {
        let cases = try Fixtures.read(Recording.self, "templates.json").cases
        var refused = 0
        for (number, sample) in cases.enumerated() {
            let messages = sample.messages.map { Message(role: $0.role, content: $0.content) }
            do {
                let text = try ChatTemplate(sample.template, names: names).prompt(messages)
                XCTAssertTrue(
                    sample.text.map { $0.utf8.elementsEqual(text.utf8) } ?? false,
                    "case \(number): \(sample.template.debugDescription) gave \(text.debugDescription)")
            } catch let error as BundleError {
                refused += sample.text == nil ? 0 : 1
                let excused = sample.text == nil || sample.known != true
                XCTAssertTrue(excused, "case \(number): \(sample.template): \(error.localizedDescription)")
            }
        }
        XCTAssertLessThan(refused, 30)
    }

    func testTemplatesWithoutEndAreRefused() {
        for template in [
            String(repeating: "(", count: 100_000), "{{ " + String(repeating: "(", count: 100_000),
            "{{ " + String(repeating: "not ", count: 100_000), String(repeating: "{% if a %}", count: 10_000),
            "{% for a in messages %}", "{{", "{{ 'a", "{% macro a() %}{% endmacro %}", "{{ a b }}", "{% else %}",
            "{{ 1 }",
        ] {
            do {
                _ = try ChatTemplate(template, names: [:])
                XCTAssertFalse(template.contains("{"), String(template.prefix(40)))
            } catch {
                XCTAssertTrue(error is BundleError)
            }
        }
    }
}
