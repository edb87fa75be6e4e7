package command

import (
	"bytes"
	"encoding/json"
	"os"
	"testing"
	"unicode"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/progress"
	"github.com/cprun/cprun/internal/run/job"
)

// FuzzEvents checks that no event of a worker writes terminal control characters or stops the launcher.
func FuzzEvents(f *testing.F) {
	f.Add([]byte(`{"step":1,"steps":2,"loss":"NaN","val_loss":"1"}`), int64(1))
	f.Add([]byte(`"a notice \u001b[31m\u009b2J\u202e"`), int64(0))
	f.Add([]byte(`{"step":-9,"steps":-1,"loss":"1e308","eta":9223372036854775807}`), int64(-1))
	f.Fuzz(func(t *testing.T, data []byte, step int64) {
		var b bytes.Buffer
		root := must.Have(os.OpenRoot(t.TempDir()))
		defer root.Close()
		tr := &tracker{out: progress.New(&b, progress.Options{}), root: root, advanced: func(int64) {}}
		for _, kind := range []string{launch.EventProgress, job.EventNotice, job.EventValidation, job.EventReport} {
			tr.event(0, launch.Event{Kind: kind, Step: step, Data: json.RawMessage(data)})
			tr.event(1, launch.Event{Kind: kind, Step: step, Data: json.RawMessage(data)})
		}
		tr.summary(launch.Result{ExitCode: launch.ExitDone})
		for _, r := range b.String() {
			if r != '\n' && r != '\t' && unicode.IsControl(r) {
				t.Fatalf("%q prints %q", data, b.String())
			}
		}
	})
}
