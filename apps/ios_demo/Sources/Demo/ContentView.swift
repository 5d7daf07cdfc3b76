import DemoModel
import SpeculativeDecoding
import SwiftUI

struct ContentView: View {
    @Bindable var model: DemoModel
    /// Whether the benchmark has the model.
    let busy: Bool

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
            ScrollView {
                LazyVStack(alignment: .leading, spacing: 8) {
                    ForEach(model.exchanges) { exchange in
                        Text(exchange.prompt).foregroundStyle(.secondary)
                        Text(colored(exchange.answer)).font(.body.monospaced()).textSelection(.enabled)
                    }
                }
                .frame(maxWidth: .infinity, alignment: .leading)
            }
            .defaultScrollAnchor(.bottom)
            Toggle("Go on with the conversation", isOn: $model.continues)
            TextEditor(text: $model.prompt)
                .frame(minHeight: 60, maxHeight: 120)
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
            .disabled(model.selected == nil || busy)
            Divider()
            SpeedRow(title: "Speculative", speed: model.speeds[true])
            SpeedRow(title: "Plain", speed: model.speeds[false])
            LabeledContent("Device") {
                Text("\(model.device.peakMB, specifier: "%.0f") MB at most, \(model.device.thermalState)")
            }
            .font(.footnote)
            if !model.status.isEmpty {
                Text(model.status).font(.footnote).foregroundStyle(.secondary)
            }
        }
        .padding()
    }

    /// Accepted drafts in green, what the main stream chose itself as it is.
    private func colored(_ answer: [Run]) -> AttributedString {
        answer.flatMap(\.pieces).reduce(into: AttributedString()) { text, piece in
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
