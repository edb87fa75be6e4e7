package job

import (
	"encoding/json"
	"reflect"
	"testing"

	"github.com/cprun/cprun/internal/run/bench"
)

// FuzzMessages checks that messages between launcher and workers are decoded or refused, and encode to the same bytes
// again.
func FuzzMessages(f *testing.F) {
	f.Add([]byte(`{"config":"train: {steps: 1}\n","run_dir":"/x","from":"","version":"v","machine":{},` +
		`"remedies":[1,2],"no_save":true}`))
	f.Add([]byte(`{"attention":{"seq":[1],"heads":2},"comm":null,"ops":{}}`))
	f.Add([]byte(`{"attention":{"Seq":-1},"comm":{"Bytes":9223372036854775807},"ops":{"Rate":1e308}}`))
	f.Add([]byte("null"))
	f.Fuzz(func(t *testing.T, text []byte) {
		for _, v := range []any{&Train{}, &bench.Task{}, &bench.Row{}} {
			if json.Unmarshal(text, v) != nil {
				continue
			}
			again := reflect.New(reflect.TypeOf(v).Elem()).Interface()
			out, err := json.Marshal(v)
			if err != nil {
				t.Fatalf("%T of %q: %v", v, text, err)
			}
			if err := json.Unmarshal(out, again); err != nil {
				t.Fatalf("%T of %s: %v", v, out, err)
			}
			third, err := json.Marshal(again)
			if err != nil || string(third) != string(out) {
				t.Errorf("%T: %s became %s, %v", v, out, third, err)
			}
		}
	})
}
