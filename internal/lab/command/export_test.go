package command

import (
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/model/config"
)

// PEFT would ignore the adapter of a text model inside a larger one.
func TestAdaptersOfALargerModelNeedMerge(t *testing.T) {
	cfg := &config.Config{}
	cfg.Model.Architecture, cfg.Model.Wrapper = "gemma3_text", "gemma3"
	if err := (&ExportOptions{}).adapter(cfg, nil, nil); err == nil || !strings.Contains(err.Error(), "--merge") {
		t.Errorf("%v", err)
	}
}
