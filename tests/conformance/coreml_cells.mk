# Equality of every Core ML cell, one file each: make -f tests/conformance/coreml_cells.mk OUT=DIR DATA_sql=FILE DATA_e2e=FILE
# A cell is ADAPTER.QUANT.SCHEDULE. What is there is kept, so an interrupted run goes on where it stopped.
# A cell that breaks the promise is written too, then make fails (-k goes on to the next).
SSDEVICE ?= .venv/bin/ssdevice
OUT      ?= out/coreml-cells
LIMIT    ?= 30
DATA_sql ?= models/prompts/sql.jsonl
DATA_e2e ?=
QUANTS   ?= int8 int4 fp16 palette4
ADAPTERS ?= sql-shared e2e-shared sql-lossless
CELLS    ?= $(foreach a,$(ADAPTERS),$(foreach q,$(QUANTS),$(a).$(q).fused $(a).$(q).deferred))
MODEL    := models/base-7m

.PHONY: all
all: $(CELLS:%=$(OUT)/%.json)

part = $(word $(1),$(subst ., ,$*))
app  = $(firstword $(subst -, ,$(call part,1)))

$(OUT)/%.json:
	@mkdir -p '$(OUT)'
	@test -n '$(DATA_$(app))' || { echo "$*: give DATA_$(app)=FILE.jsonl" >&2; exit 2; }
	$(SSDEVICE) export --model $(MODEL) --adapter $(app)=models/adapters/$(call part,1) --target coreml \
	  --quant $(call part,2) --schedule $(call part,3) --out '$(OUT)/$*.bundle' --overwrite > '$(OUT)/$*.export'
	$(SSDEVICE) verify '$(OUT)/$*.bundle' --data '$(DATA_$(app))' --limit $(LIMIT) --json \
	  --model $(MODEL) --adapter models/adapters/$(call part,1) > '$@.part'; \
	  status=$$?; rm -rf '$(OUT)/$*.bundle'; test -s '$@.part' && mv '$@.part' '$@' && exit $$status
