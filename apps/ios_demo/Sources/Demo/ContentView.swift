import DemoModel
import SpeculativeDecoding
import SwiftUI

struct ContentView: View {
    /// Bundles are looked for in the app's documents and in what it was shipped with.
    @State private var model = DemoModel(places: [URL.documentsDirectory] + [Bundle.main.resourceURL].compactMap { $0 })

    var body: some View {
        VStack(alignment: .leading, spacing: 12) {
            Picker("Bundle", selection: $model.selected) {
                ForEach(model.bundles, id: \.self) { bundle in
                    Text(bundle.lastPathComponent).tag(Optional(bundle))
                }
            }
            .disabled(model.task != nil)
            if model.apps.count > 1 {
                Picker("App", selection: $model.app) {
                    ForEach(model.apps, id: \.self) { Text($0).tag($0) }
                }
                .disabled(model.task != nil)
            }
            TextEditor(text: $model.prompt)
                .frame(minHeight: 80, maxHeight: 160)
                .border(.separator)
            HStack {
                Button("Speculative") { model.run(speculate: true) }
                    .buttonStyle(.borderedProminent)
                Button("Plain") { model.run(speculate: false) }
                    .buttonStyle(.bordered)
                Spacer()
                if model.task != nil {
                    Button("Stop", role: .cancel) { model.cancel() }
                }
            }
            .disabled(model.selected == nil)
            ScrollView {
                Text(colored)
                    .font(.body.monospaced())
                    .textSelection(.enabled)
                    .frame(maxWidth: .infinity, alignment: .leading)
            }
            Divider()
            SpeedRow(title: "Speculative", speed: model.speeds[true])
            SpeedRow(title: "Plain", speed: model.speeds[false])
            if !model.status.isEmpty {
                Text(model.status).font(.footnote).foregroundStyle(.secondary)
            }
        }
        .padding()
        .onAppear { model.findBundles() }
    }

    /// Accepted drafts in green, what the main stream chose itself as it is.
    private var colored: AttributedString {
        model.answer.flatMap(\.pieces).reduce(into: AttributedString()) { text, piece in
            var colored = AttributedString(piece.text)
            if piece.accepted { colored.foregroundColor = .green }
            text += colored
        }
    }
}

private struct SpeedRow: View {
    let title: String
    let speed: Speed?

    var body: some View {
        LabeledContent(title) {
            if let speed, speed.steps > 0 {
                Text(
                    """
                    \(speed.tokensPerSecond, specifier: "%.1f") tokens/s, \
                    \(speed.tokensPerStep, specifier: "%.2f") per step
                    """
                )
                .monospacedDigit()
            } else {
                Text("not run")
            }
        }
        .font(.footnote)
    }
}
