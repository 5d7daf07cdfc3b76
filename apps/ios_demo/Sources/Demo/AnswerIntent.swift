#if canImport(AppIntents)
    import AppIntents
    import DemoModel

    /// For Shortcuts and Siri: the answer of the first bundle's default app.
    struct AnswerIntent: AppIntent {
        static let title: LocalizedStringResource = "Answer a Prompt"
        static let description = IntentDescription("Answers a prompt with a bundle on this device.")

        @Parameter(title: "Prompt")
        var prompt: String

        func perform() async throws -> some IntentResult & ReturnsValue<String> {
            .result(value: try await DemoModel.answer(to: prompt, places: DemoApp.places))
        }
    }
#endif
