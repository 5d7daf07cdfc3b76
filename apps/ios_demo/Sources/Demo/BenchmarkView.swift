import DemoModel
import SpeculativeDecoding
import SwiftUI

struct BenchmarkView: View {
    @Bindable var model: BenchmarkModel
    /// Whether an answer is being decoded.
    let busy: Bool

    var body: some View {
        Form {
            Section("Prompts, with an empty line between them") {
                TextEditor(text: $model.prompts).frame(minHeight: 120)
                Stepper("\(model.rounds) rounds", value: $model.rounds, in: 1...10)
                Stepper("\(model.maxTokens) tokens at most", value: $model.maxTokens, in: 8...512, step: 8)
            }
            Section {
                if model.task != nil {
                    ProgressView(value: model.progress)
                    Button("Stop", role: .cancel) { model.cancel() }
                } else {
                    Button("Measure") { model.run() }.disabled(busy)
                }
                if !model.status.isEmpty { Text(model.status).foregroundStyle(.secondary) }
            }
            if !model.rows.isEmpty {
                Section("Modes") {
                    ForEach(model.rows) { row in
                        LabeledContent(row.mode.rawValue) {
                            Text(
                                """
                                \(row.tokensPerSecond, specifier: "%.1f") tokens/s, \
                                \(row.tokensPerStep, specifier: "%.2f") per step, \
                                first after \(row.firstTokenMs, specifier: "%.0f") ms
                                """
                            )
                        }
                    }
                    if let speedup = model.speedup {
                        LabeledContent("Speed-up") { Text("\(speedup, specifier: "%.2f")") }
                    }
                }
                Section("Cost by width") {
                    ForEach(model.costs, id: \.function) { cost in
                        LabeledContent("\(cost.function), \(cost.width) wide") {
                            Text("\(cost.milliseconds, specifier: "%.2f") ms")
                        }
                    }
                }
                if let file = model.file { ShareLink("Report as JSON", item: file) }
            }
        }
        .monospacedDigit()
    }
}
