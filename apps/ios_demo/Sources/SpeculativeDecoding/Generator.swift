import Foundation

/// What one call of the target added to an answer.
public struct Run: Sendable {
    /// Text that is certain now.
    public let text: String
    /// True for text of drafts that were accepted, false for the token the main stream chose itself.
    public let accepted: Bool
}

/// Speed of an answer as far as it has come; prefill is left out.
public struct Speed: Sendable {
    public var tokens = 0
    public var steps = 0
    public var seconds = 0.0

    public init() {}
    public var tokensPerSecond: Double { seconds > 0 ? Double(tokens) / seconds : 0 }
    public var tokensPerStep: Double { steps > 0 ? Double(tokens) / Double(steps) : 0 }
}

/// Prompts in, runs of text out.
public struct Generator: Sendable {
    public let bundle: ModelBundle
    public let tokenizer: Tokenizer
    public let target: Target
    private let frame: ModelBundle.Settings.Prompt

    /// `app`: nil for the bundle's default one.
    public init(folder: URL, app: String? = nil) async throws {
        bundle = try ModelBundle(folder: folder)
        tokenizer = try Tokenizer(file: bundle.url(role: "tokenizer"))
        target = try await Target(bundle: bundle, app: app)
        frame = try bundle.prompt(app: app)
    }

    /// Decodes one answer. The text is the same with and without `speculate`.
    public func answer(
        _ prompt: String, speculate: Bool, maxTokens: Int = 256,
        each: @Sendable (Run, Speed) async -> Void
    ) async throws -> Speed {
        let ids = tokenizer.encode(frame.before + prompt + frame.after)
        guard ids.count <= target.geometry.context else {
            throw BundleError.unsupported("a prompt of \(ids.count) tokens")
        }
        let stops = Set(bundle.manifest.chat.stopIds)
        var speed = Speed()
        var text = UTF8Assembler()

        // The whole loop of a host: integers in, integers out.
        await target.reset()
        var root = try await target.prefill(ids)
        var emitted = 1
        await each(Run(text: text.add(tokenizer.bytes(root)), accepted: false), speed)
        while !stops.contains(root) {
            let length = await target.length
            let room = min(maxTokens - emitted, target.geometry.context - length)
            if room <= 0 || Task.isCancelled { break }
            let clock = ContinuousClock.now
            var run = speculate ? try await target.step(root) : [try await target.plainStep(root)]
            speed.seconds += clock.duration(to: .now).inSeconds
            run = Array(run.prefix(room))
            if let stop = run.firstIndex(where: stops.contains) { run = Array(run[...stop]) }
            await target.advance(by: run.count)
            emitted += run.count
            root = run[run.count - 1]
            speed.tokens += run.count
            speed.steps += 1
            for (index, token) in run.enumerated() {
                await each(Run(text: text.add(tokenizer.bytes(token)), accepted: index < run.count - 1), speed)
            }
        }
        return speed
    }
}

/// Bytes of tokens to text, holding back characters that are not whole yet.
struct UTF8Assembler {
    private var pending: [UInt8] = []

    mutating func add(_ bytes: [UInt8]) -> String {
        pending += bytes
        let keep = Self.incompleteSuffix(pending)
        let whole = pending.dropLast(keep)
        pending = Array(pending.suffix(keep))
        return String(decoding: whole, as: UTF8.self)
    }

    /// How many bytes at the end begin a character that is not complete.
    static func incompleteSuffix(_ bytes: [UInt8]) -> Int {
        for back in 1...4 where back <= bytes.count {
            let byte = bytes[bytes.count - back]
            if byte & 0b1100_0000 == 0b1000_0000 { continue }
            let needed = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1
            return needed > back ? back : 0
        }
        return 0
    }
}

extension Duration {
    var inSeconds: Double {
        Double(components.seconds) + Double(components.attoseconds) * 1e-18
    }
}
