// The engine and the ticket that Python holds.
#pragma once

#include <cerrno>
#include <map>
#include <memory>
#include <mutex>

#include "abi.hpp"
#include "batch.hpp"
#include "drive.hpp"

struct tutti_ticket {
    std::shared_ptr<tutti::Batch> batch;
};

struct tutti_engine {
    explicit tutti_engine(const tutti_options &given) : options(given), refused(given.pool ? ECANCELED : tutti_uring_probe()) {}

    std::shared_ptr<tutti::Drive> find(std::uint16_t drive) {
        std::lock_guard lock(mutex);
        const auto found = drives.find(drive);
        return found == drives.end() ? nullptr : found->second;
    }

    /// With the lock: the drive, opened at first use; null when there is no thread to be had. A single drive may fall back, when its
    /// ring finds no more memory or descriptors.
    std::shared_ptr<tutti::Drive> open(std::uint16_t drive) {
        if (const auto found = drives.find(drive); found != drives.end()) return found->second;
        std::shared_ptr<tutti::Drive> opened;
        if (!refused) opened = tutti::open_uring_drive(drive, options, refused);
        if (!opened) opened = tutti::open_pool_drive(drive, options);
        if (opened) drives.emplace(drive, opened);
        return opened;
    }

    std::map<std::uint16_t, std::shared_ptr<tutti::Drive>> all() {
        std::lock_guard lock(mutex);
        return drives;
    }

    void drop(const tutti::Batch &batch, std::int32_t error) {
        for (const auto &part : batch.parts)
            if (const auto drive = find(part.drive)) drive->queue.drop(&batch, error);
    }

    const tutti_options options;
    std::mutex mutex, closing;
    std::map<std::uint16_t, std::shared_ptr<tutti::Drive>> drives;
    int refused;
    bool closed = false;
};

namespace tutti {

/// Wait at most `timeout` ns until the batch is done; true when it is. What has not started by its deadline ends.
bool wait_for(tutti_engine *engine, Batch &batch, std::int64_t timeout);

/// As tutti_engine_submit, in transfers of at most `max_io` bytes.
tutti_ticket *submit(tutti_engine *engine, std::span<const tutti_ioctx> contexts, unsigned klass, std::int64_t deadline,
                     std::uint32_t max_io);

}  // namespace tutti
