package command

import (
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/progress"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/text/data"
)

func TestDataLines(t *testing.T) {
	cfg := &config.Config{Data: config.Data{SeqLen: 4096}}
	one := int64(1)
	d := plan.Data{Files: 1, Documents: &one, Tokens: 12345, Targets: 8192, Samples: 2, SampleTokens: 8192,
		StepsPerEpoch: 1}
	want := []string{"data: 1 file, 1 document, 12,345 tokens",
		"samples: 2 of 4,096 tokens, 8,192 targets; an epoch is 1 step"}
	if got := dataLines(&d, cfg); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	d.Retention = []data.Share{{SeqLen: 4096, Kept: 0.3}, {SeqLen: 8192, Kept: 0.9999}, {SeqLen: 16384, Kept: 1}}
	d.Documents, d.DroppedDocuments, d.Ignored = nil, 3, []string{"label", "position_ids"}
	got := dataLines(&d, cfg)
	if len(got) != 4 || !strings.Contains(got[0], "documents not counted yet") ||
		!strings.HasSuffix(got[0], "3 documents dropped") || !strings.HasSuffix(got[3], "label, position_ids") ||
		!strings.HasSuffix(got[2], ": 4K keeps 30 %, 8K 99.9 %, 16K 100 %") {
		t.Errorf("got %q", got)
	}
	d.Warnings = []string{data.FormNote + "x", "y"}
	if got := dataLines(&d, cfg)[4:]; !slices.Equal(got, []string{"data: " + data.FormNote + "x", "data: warning: y"}) {
		t.Errorf("notes: %q", got)
	}
	if got := dataLines(nil, cfg); got != nil {
		t.Errorf("data that are not there: %q", got)
	}
}

// The summary prints the loss of the last step with targets.
func TestTheLastLossIsTold(t *testing.T) {
	var b bytes.Buffer
	root := must.Have(os.OpenRoot(t.TempDir()))
	defer root.Close()
	tr := &tracker{out: progress.New(&b, progress.Options{}), root: root}
	for _, text := range []string{`{"step":1,"steps":2,"loss":"1.5"}`, `{"step":2,"steps":2,"loss":"NaN"}`} {
		tr.event(0, launch.Event{Kind: launch.EventProgress, Data: json.RawMessage(text)})
	}
	tr.summary(launch.Result{ExitCode: launch.ExitDone})
	if !strings.Contains(b.String(), "loss 1.5000") || strings.Contains(b.String(), "NaN") {
		t.Errorf("printed %q", b.String())
	}
}
