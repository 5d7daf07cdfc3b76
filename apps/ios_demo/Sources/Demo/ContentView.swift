import SpeculativeDecoding
import SwiftUI

struct ContentView: View {
    @State private var model = DemoModel()

    var body: some View {
        VStack(alignment: .leading, spacing: 12) {
            Picker("App", selection: $model.selected) {
                ForEach(model.bundles, id: \.self) { bundle in
                    Text(bundle.lastPathComponent).tag(Optional(bundle))
                }
            }
            .disabled(model.task != nil)
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
        model.answer.reduce(into: AttributedString()) { text, run in
            var piece = AttributedString(run.text)
            if run.accepted { piece.foregroundColor = .green }
            text += piece
        }
    }
}

private struct SpeedRow: View {
    let title: String
    let speed: Speed?

    var body: some View {
        LabeledContent(title) {
            if let speed, speed.steps > 0 {
                Text("\(speed.tokensPerSecond, specifier: "%.1f") tokens/s, \(speed.tokensPerStep, specifier: "%.2f") per step")
                    .monospacedDigit()
            } else {
                Text("not run")
            }
        }
        .font(.footnote)
    }
}
