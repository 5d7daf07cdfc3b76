/// A message of a conversation.
public struct Message: Sendable, Equatable {
    public let role: String
    public let content: String

    public init(role: String, content: String) {
        self.role = role
        self.content = content
    }
}

/// A bundle's chat format: the texts that stand around messages, as in `ssdevice/text/frames.py`.
struct Frames: Decodable, Sendable {
    struct Frame: Decodable, Sendable {
        enum Trim: String, Decodable {
            case none, space, left, right, both
        }

        let before: String
        let after: String
        let trim: Trim?

        func around(_ content: String) -> String {
            var kept = Substring(content).unicodeScalars
            if trim == .space, kept.first == " " { kept.removeFirst() }
            if trim == .left || trim == .both { kept = kept.drop(while: isBlank) }
            if trim == .right || trim == .both {
                while let last = kept.last, isBlank(last) { kept.removeLast() }
            }
            return before + String(kept) + after
        }
    }

    let first: Frame
    let system: Frame?
    let afterSystem: Frame?
    let user: Frame?
    let assistant: Frame?
    let answer: String
    let emptySystem: Bool?

    /// Whether they hold for conversations, and not only for one question.
    var areWhole: Bool { user != nil && assistant != nil }

    /// The prompt for the answer to the last message. Throws `BundleError.request` for a message that has no place where it stands.
    func prompt(_ messages: [Message]) throws -> String {
        var text = ""
        var places = ["system": system, "user": first]
        for message in messages {
            guard let place = places[message.role], let frame = place else {
                throw BundleError.request("the chat format takes no \(message.role) message there")
            }
            guard message.role != "user" || !message.content.unicodeScalars.allSatisfy(isBlank) else {
                throw BundleError.request("a message of the conversation is empty")
            }
            if message.role == "system", message.content.isEmpty, emptySystem == false {
                places = ["user": first]
                continue
            }
            text += frame.around(message.content)
            switch message.role {
            case "user": places = ["assistant": assistant]
            case "system": places = ["user": afterSystem]
            default: places = ["user": user]
            }
        }
        guard messages.last?.role != "system" else {
            throw BundleError.request("a conversation does not end with its system message")
        }
        return text + answer
    }
}

/// Python's white space.
private func isBlank(_ scalar: Unicode.Scalar) -> Bool {
    scalar.properties.isWhitespace || 0x1C...0x1F ~= scalar.value
}
