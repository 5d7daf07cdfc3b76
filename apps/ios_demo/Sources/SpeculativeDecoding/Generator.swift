import Foundation

/// A bundle that answers prompts, as one of its apps at a time.
///
///     let generator = try await Generator(folder: folder)
///     for try await run in try await generator.answer("How many singers are there?") {
///         print(run.text, terminator: "")
///     }
public actor Generator {
    /// Opens the functions of an app.
    public typealias Open = @Sendable (Manifest.App) async throws -> Conversation

    public nonisolated let bundle: ModelBundle
    public nonisolated let tokenizer: Tokenizer
    private let open: Open
    private var opened: [String: Conversation] = [:]
    public private(set) var app: Manifest.App

    /// `app`: nil for the bundle's default one.
    public init(bundle: ModelBundle, app: String? = nil, open: @escaping Open) async throws {
        self.bundle = bundle
        self.open = open
        self.app = try bundle.app(app)
        tokenizer = try Tokenizer(file: bundle.url(role: "tokenizer"))
        _ = try await conversation()
    }

    /// Switches to another app, whose conversation starts over. Those that were used stay open, so switching back takes
    /// no time.
    public func use(_ name: String) async throws {
        let before = app
        app = try bundle.app(name)
        do {
            try await conversation().reset()
        } catch {
            app = before
            throw error
        }
    }

    /// The answer to a single prompt, with which the conversation starts over. It is the same with and without
    /// `speculate`. What the prompt begins with and the cache holds, such as the app's instruction, is not computed
    /// again.
    ///
    /// `stop`: strings that end the answer and are not part of it. `sampling`: how tokens are chosen; without it the
    /// likeliest are. It begins when its first run is asked for, and ends the app's answer before it. Throws
    /// `BundleError.request` for what cannot be answered.
    public func answer(
        _ prompt: String, speculate: Bool = true, maxTokens: Int = 256, stop: [String] = [],
        sampling: Sampling = Sampling()
    ) async throws -> Answer {
        try check(prompt)
        let conversation = try await conversation()
        let mode = Mode(speculate: speculate, functions: conversation.functions)
        return try answer(promptIds(prompt), nil, by: conversation, mode, maxTokens, stop, sampling)
    }

    /// The answer to the next message of a conversation, which lasts until `reset`, `use` or `answer`. Only tokens that
    /// are not in the cache are computed. What an answer that was left said so far counts.
    ///
    /// Throws also `BundleError.unsupported` for a bundle whose chat format needs jinja2.
    public func chat(
        _ message: String, speculate: Bool = true, maxTokens: Int = 256, stop: [String] = [],
        sampling: Sampling = Sampling()
    ) async throws -> Answer {
        try check(message)
        let conversation = try await conversation()
        guard let frames = bundle.manifest.chat.frames, frames.areWhole else {
            throw needsFrames("conversations")
        }
        let turn = await conversation.turn(content(message))
        let prompt = try frames.prompt(turn.messages)
        try check(prompt)
        let mode = Mode(speculate: speculate, functions: conversation.functions)
        return try answer(tokenizer.encode(prompt), turn, by: conversation, mode, maxTokens, stop, sampling)
    }

    /// Sampling as the model recommends, for the calls above. Change what is to be otherwise:
    ///
    ///     var sampling = generator.sampling(seed: 7)
    ///     sampling.topP = 0.9
    public nonisolated func sampling(seed: UInt64 = 0) -> Sampling {
        Sampling(recommended: bundle.manifest.sampling, seed: seed)
    }

    /// The modes that the app has the functions for, as `ssdevice bench` names them.
    public func modes() async throws -> [Mode] {
        let functions = try await conversation().functions
        let plain = functions.contains(.plain)
        return Mode.allCases.filter { $0 == .plain ? plain : functions.contains(.step) && ($0 != .adaptive || plain) }
    }

    /// What calls of the app's functions cost, see `Conversation`.
    public func costs(calls: Int = 40) async throws -> [Cost] {
        try await conversation().costs(calls: calls)
    }

    /// Forgets the conversation.
    public func reset() async throws {
        try await conversation().reset()
    }

    /// The same for a prompt in tokens, without the app's frame, in a mode that the app has the functions for.
    public func answer(
        _ prompt: [Int32], mode: Mode, maxTokens: Int = 256, stop: [String] = [], sampling: Sampling = Sampling()
    ) async throws -> Answer {
        try await answer(prompt, nil, by: conversation(), mode, maxTokens, stop, sampling)
    }

    private func answer(
        _ prompt: [Int32], _ turn: Turn?, by conversation: Conversation, _ mode: Mode, _ maxTokens: Int,
        _ stop: [String], _ sampling: Sampling
    ) throws -> Answer {
        guard stop.allSatisfy({ !$0.isEmpty }) else { throw BundleError.request("a stop string is empty") }
        let stopIds = Set(bundle.manifest.chat.stopIds.compactMap(Int32.init(exactly:)))
        return try Answer(
            conversation: conversation, geometry: bundle.manifest.geometry, prompt: prompt, mode: mode,
            maxTokens: maxTokens, output: TextOutput(tokenizer: tokenizer, stopIds: stopIds, stops: stop), turn: turn,
            sampling: sampling
        )
    }

    private func check(_ prompt: String) throws {
        guard prompt.contains(where: { !$0.isWhitespace }) else { throw BundleError.request("the prompt is empty") }
        // Tokens of any text have far fewer characters, and take time to find.
        guard prompt.utf8.count <= (bundle.manifest.geometry.context + 64) * 256 else {
            throw BundleError.request("the prompt has \(prompt.utf8.count) bytes, far more than the context")
        }
    }

    /// The tokens of a prompt in the chat format that the app was trained with.
    public func promptIds(_ prompt: String) throws -> [Int32] {
        guard let frames = bundle.manifest.chat.frames else { throw needsFrames("prompts") }
        return tokenizer.encode(try frames.prompt([Message(role: "user", content: content(prompt))]))
    }

    private func content(_ prompt: String) -> String {
        guard let instruction = app.instruction, !instruction.isEmpty else { return prompt }
        return "\(instruction)\n\(prompt)"
    }

    private func needsFrames(_ what: String) -> BundleError {
        .unsupported(
            "\(what) of this bundle: its chat template is more than texts around messages (prompt frames), which is all "
                + "that this host writes; bundles of older versions have to be exported again")
    }

    private func conversation() async throws -> Conversation {
        if let known = opened[app.name] { return known }
        let wanted = app
        let conversation = try await open(wanted)
        opened[wanted.name] = opened[wanted.name] ?? conversation
        return opened[wanted.name]!
    }
}
