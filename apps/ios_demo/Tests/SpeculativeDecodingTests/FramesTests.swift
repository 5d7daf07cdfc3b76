import XCTest

@testable import SpeculativeDecoding

/// Frames give the prompts of the chat templates that they were made of, as Python's jinja2 renders these.
final class FramesTests: XCTestCase {
    private struct Recording: Decodable {
        struct Case: Decodable {
            struct Message: Decodable {
                let role: String
                let content: String
            }

            let template: String
            let frames: Frames
            let messages: [Message]
            /// Nil where the template refuses the conversation.
            let text: String?
        }

        let cases: [Case]
    }

    func testPromptsAreThoseOfTemplates() throws {
        let cases = try Fixtures.read(Recording.self, "frames.json").cases
        XCTAssertGreaterThan(cases.count, 200)
        for (number, sample) in cases.enumerated() {
            let messages = sample.messages.map { Message(role: $0.role, content: $0.content) }
            let place = "case \(number), \(sample.template)"
            do {
                let text = try sample.frames.prompt(messages)
                XCTAssertTrue(sample.text.map { $0.utf8.elementsEqual(text.utf8) } ?? false, "\(place): \(text)")
            } catch let error as BundleError {
                XCTAssertNil(sample.text, "\(place): \(error.localizedDescription)")
            }
        }
    }
}
