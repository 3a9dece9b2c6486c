"""The constants of the original's native module: one for each status."""

from __future__ import annotations

from .status import LLMStatusCode as _Code

kSuccess = int(_Code.LLM_SUCCESS)
kFailed = int(_Code.LLM_FAILED)
kParamInvalid = int(_Code.LLM_PARAM_INVALID)
kLLMWaitProcessTimeOut = int(_Code.LLM_WAIT_PROCESS_TIMEOUT)
kLLMKVCacheNotExist = int(_Code.LLM_KV_CACHE_NOT_EXIST)
kLLMRepeatRequest = int(_Code.LLM_REPEAT_REQUEST)
kLLMRequestAlreadyCompleted = int(_Code.LLM_REQUEST_ALREADY_COMPLETED)
kLLMEngineFinalized = int(_Code.LLM_ENGINE_FINALIZED)
kLLMNotYetLink = int(_Code.LLM_NOT_YET_LINK)
kAlreadyLink = int(_Code.LLM_ALREADY_LINK)
kLinKFailed = int(_Code.LLM_LINK_FAILED)  # spelled so in the original
kUnlinkFailed = int(_Code.LLM_UNLINK_FAILED)
kNotifyPromptUnlinkFailed = int(_Code.LLM_NOTIFY_PROMPT_UNLINK_FAILED)
kLLMClusterNumExceedLimit = int(_Code.LLM_CLUSTER_NUM_EXCEED_LIMIT)
kProcessingLink = int(_Code.LLM_PROCESSING_LINK)
kDeviceOutOfMemory = int(_Code.LLM_DEVICE_OUT_OF_MEMORY)
kPrefixAlreadyExist = int(_Code.LLM_PREFIX_ALREADY_EXIST)
kPrefixNotExist = int(_Code.LLM_PREFIX_NOT_EXIST)
kLLMSeqLenOverLimit = int(_Code.LLM_SEQ_LENOVERLIMIT)
kLLMNoFreeBlock = int(_Code.LLM_NO_FREE_BLOCK)
kLLMBlocksOutOfMemory = int(_Code.LLM_BLOCKS_OUT_OF_MEMORY)
kLLMExistLink = int(_Code.LLM_EXIST_LINK)
kLLMFeatureNotEnabled = int(_Code.LLM_FEATURE_NOT_ENABLED)
kLLMTimeout = int(_Code.LLM_TIMEOUT)
kLLMLinkBusy = int(_Code.LLM_LINK_BUSY)
kLLMOutOfMemory = int(_Code.LLM_OUT_OF_MEMORY)
kLLMDeviceMemError = int(_Code.LLM_DEVICE_MEM_ERROR)
kLLMSuspectRemoteError = int(_Code.LLM_SUSPECT_REMOTE_ERROR)
