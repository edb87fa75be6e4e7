package hf

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"
)

// The loss of balance is on by train.yaml alone. Its factor may be that of config.json.
func TestBalanceCoef(t *testing.T) {
	for _, c := range []struct {
		family, file string // router_aux_loss_coef of config.json; "": absent
		on           bool
		coef, want   float64
		fault        string // its key; "": none
	}{
		{"qwen3_moe", "", false, 0, 0, ""},
		{"qwen3_moe", "0.9", false, 0, 0, ""},
		{"qwen3_moe", "", true, 0, 0.001, ""},
		{"qwen3_moe", "null", true, 0, 0.001, ""},
		{"mixtral", "0.02", true, 0, 0.02, ""},
		{"mixtral", "0.0", true, 0, 0, ""},
		{"mixtral", "0.02", true, 0.5, 0.5, ""},
		{"mixtral", `"x"`, true, 0.5, 0.5, ""},
		{"mixtral", `"x"`, true, 0, 0, logitsKey},
		{"mixtral", "-1", true, 0, 0, logitsKey},
		{"mixtral", "", false, 0.5, 0, coefKey},
		{"glm4_moe", "", true, 0, 0, logitsKey},
		{"qwen3", "", true, 0, 0, logitsKey},
	} {
		dir := map[string]string{"qwen3": "../testdata/parity/tiny-qwen3-yarn"}[c.family]
		if dir == "" {
			dir = "../testdata/families/" + c.family
		}
		cfg, err := ReadConfig(dir)
		if err != nil {
			t.Fatal(err)
		}
		cfg.Unused = map[string]json.RawMessage{logitsKey: json.RawMessage("true")}
		if c.file != "" {
			cfg.Unused[coefKey] = json.RawMessage(c.file)
		}
		cfg.OutputRouterLogits, cfg.RouterAuxLossCoef = c.on, c.coef
		faults := cfg.Check()
		if refused := slices.ContainsFunc(faults, func(f Fault) bool { return f.Key == c.fault }); refused != (c.fault != "") ||
			len(faults) > 1 || !refused && cfg.BalanceCoef() != c.want {
			t.Errorf("%+v: faults %v, factor %v", c, faults, cfg.BalanceCoef())
		}
	}
}

// An export repeats the keys of config.json, and has none of a run.
func TestExportsKeepKeysOfBalance(t *testing.T) {
	c, err := ReadConfig("../testdata/families/qwen3_moe")
	if err != nil {
		t.Fatal(err)
	}
	c.OutputRouterLogits, c.RouterAuxLossCoef = true, 0.5
	for _, want := range []string{"false 0.001", "<nil> <nil>"} {
		keys, err := c.keys("", "F32")
		text := func(key string) string {
			if raw, ok := keys[key].(json.RawMessage); ok {
				return string(raw)
			}
			return fmt.Sprint(keys[key])
		}
		if got := text(logitsKey) + " " + text(coefKey); err != nil || got != want {
			t.Errorf("keys %s, %v, want %s", got, err, want)
		}
		c.Unused = nil
	}
}
